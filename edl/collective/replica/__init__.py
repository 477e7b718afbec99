"""Copies of sharded states on a peer's host, so that losing a host loses no shard.

`replicator` runs in an agent and decides when a copy is sent. `peers` sends the copy from agent to agent. States that
every rank holds in full need no replica.
"""
