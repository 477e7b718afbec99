"""Dynamic batching: the queue of jobs, the worker threads, and the execution of a batch on a backend.

A job enters as a decoded request and leaves with its response. gRPC calls and streams are handled in `inference`.
"""
