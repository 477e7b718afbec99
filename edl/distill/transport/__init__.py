"""Sends a request to a teacher: KServe v2 over gRPC, with tensors in the message or in shared memory.

- `schema` holds what is asked for and what models take and give; `request` a request's tensors;
- `client` is the connection to a teacher, `stream` its bidirectional stream;
- `calls` is the channel with its single calls and their errors; `probe` finds out by them what a server is;
- `replies` makes labels of answers, and checks them;
- `shm` is the memory that teachers on this host read.

What does not belong here: which teacher gets a request, and connecting again (`edl.distill.engine`).
"""
