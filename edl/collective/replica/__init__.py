"""Copies of sharded states on a peer's host, so that the loss of a host loses no shard.

`states` says which states are kept and found, `course` when one is sent; `protocol`, `client` and `server` send it from
agent to agent; `replication` is an agent's part. States that every rank holds whole need no replica.
"""
