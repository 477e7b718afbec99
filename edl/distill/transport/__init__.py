"""Sends a request to a teacher: KServe v2 over gRPC, with tensors in the message or in shared memory."""
