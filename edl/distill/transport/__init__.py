"""Sends one request to one teacher: KServe v2 over gRPC, with tensors in the message or in shared memory.

- `request` holds what is asked for and one request's tensors; `client` is one teacher, `stream` its bidirectional
  stream;
- `shm` is the memory that teachers on this host read, `shm_registration` the names under which they know it;
- `grpc_status` translates gRPC's errors, `message_limits` bounds messages, `tracing` numbers requests.

What does not belong here: which teacher gets a request, and connecting again (`edl.distill.engine`).
"""
