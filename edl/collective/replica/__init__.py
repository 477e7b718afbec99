"""Copies of sharded states on a peer's host, so that losing a host loses no shard.

`replicator` is an agent's part in this: it decides when a copy is sent. `peers` sends the copy from agent to agent.
States that every rank holds in full need no replica.
"""
