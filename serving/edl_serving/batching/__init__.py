"""Dynamic batching: the queue of jobs, the worker threads, and the execution of a batch on a backend.

What does not belong here: gRPC calls and streams. A job comes in as a decoded request, and leaves with its response.
"""
