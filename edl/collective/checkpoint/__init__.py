"""The state of a job, and where it is kept: in memory that outlives the worker, and on storage.

`state` is what is saved, `encoding` and `snapshot` its bytes, `slots` the memory; `checkpointer` saves and restores,
`pace` says how often, `choice` which of several states is gone on from, `keeping` which are kept for replicas and where
those lie; `transfer` moves states between ranks; `storage` writes slots to any file system, in the format of
`torch.distributed.checkpoint`.

What does not belong here: how copies come to other hosts (`edl.collective.replica`, of which nothing here knows), and
who asks for a save.
"""
