"""Which nodes train together: the records in the Store, the state machine over them, and how long it waits."""
