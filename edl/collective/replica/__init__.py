"""Copies of sharded states on a peer's host, so that the loss of a host loses no shard.

`replicator` is an agent's part and says when a copy is sent; `peers` sends it from agent to agent. Workers have to know
as well which states are kept and where they lie: `edl.collective.checkpoint.memory.replica_slots`. States that every
rank holds whole need no replica.
"""
