"""KServe v2 over gRPC: methods, streams, the clients that call them, authentication, and listening addresses.

What does not belong here: what a message holds (`edl_serving.messages`), how it is computed (`edl_serving.batching`).
"""
