"""Which nodes train together: the records in the Store, the state machine over them, and how long it waits.

`rendezvous`, `pause`, `membership_timer` and `quorum_wait` decide, without I/O; `node_records` and `excluded_hosts`
read and write the Store. What does not belong here: what an agent does about it (`edl.collective.agent.reconciler`).
"""
