"""Sends a request to a teacher: KServe v2 over gRPC, with tensors in the message or in shared memory.

- `schema` describes requested labels, and the inputs and outputs of models; `request` holds a request's tensors;
- `client` is the connection to a teacher, which converts answers to labels; `channel` is its tensor channel;
- `calls` is the gRPC channel with its unary calls and their errors, which also inspects servers;
- `shm` is the shared memory that teachers on this host read.
"""
