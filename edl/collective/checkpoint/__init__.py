"""Checkpoints of a job's state, in memory that outlives the worker and in storage.

`checkpointer` saves and restores the state, and decides how often to save. `state` defines what is saved, and
`encoding` turns it into bytes. `memory` keeps states in slots, moves them between ranks, and chooses the state from
which training resumes. `storage` writes slots to any file system, in the format of `torch.distributed.checkpoint`.
Replicas on other hosts are in `edl.collective.replica`, which nothing here imports.
"""
