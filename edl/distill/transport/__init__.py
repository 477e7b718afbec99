"""Sends a request to a teacher: KServe v2 over gRPC, with tensors in the message or in shared memory.

- `schema` holds what is asked for and what models take and give; `request` a request's tensors, `conversion` their
  types;
- `client` is the connection to a teacher, `stream` its bidirectional stream;
- `shm` is the memory that teachers on this host read, `shm_registration` the names under which they know it;
- `grpc_status` translates gRPC's errors, `message_limits` bounds messages, `tracing` numbers requests.

What does not belong here: which teacher gets a request, and connecting again (`edl.distill.engine`).
"""
