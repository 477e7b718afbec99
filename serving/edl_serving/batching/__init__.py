"""Dynamic batching: the job queue, the worker threads, and the execution of batches on a backend."""
