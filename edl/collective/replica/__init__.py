"""Copies of sharded states on a peer's host, so that the loss of a host loses no shard.

`replicator` is an agent's part, and says when a copy is sent; `peers` and `protocol` send it from agent to agent. Which
states are kept and where they lie is for workers to know as well, and so it stands in
`edl.collective.checkpoint.memory.replica_slots`. States that every rank holds whole need no replica.
"""
