"""Sends a request to a teacher: KServe v2 over gRPC, with tensors in the message or in shared memory.

- `schema` describes requested labels, and the inputs and outputs of models; `request` holds a request's tensors;
- `client` is the connection to a teacher, and `stream` its bidirectional stream;
- `calls` is the channel with its unary calls and their errors; `probe` uses them to inspect a server;
- `replies` checks answers and converts them to labels;
- `shm` is the memory that teachers on this host read.

The choice of teachers and reconnecting are in `edl.distill.dispatch` and `edl.distill.engine`.
"""
