"""Keeps states in shared memory that outlives the worker: slots, their writer and reader, and the restore."""
