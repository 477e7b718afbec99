"""Copies of sharded states on a peer's host, so that losing a host loses no shard.

`replicator` is an agent's part and decides when a copy is sent; `peers` sends it from agent to agent. Workers also need
to know which states are kept and where they are, so that is in `edl.collective.checkpoint.memory.replica_slots`. States
that every rank holds in full need no replica.
"""
