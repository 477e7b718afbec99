"""Dynamic batching: the queue of jobs, the worker threads, and the execution of a batch on a backend."""
