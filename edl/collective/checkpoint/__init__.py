"""The state of a job, and where it is kept: in memory that outlives the worker, and on storage.

`checkpointer` saves and restores, and says how often. `state` is what is saved and `encoding` its bytes;
`memory` keeps it in slots, moves it between ranks and chooses which of several states training goes on from; `storage`
writes slots to any file system, in the format of `torch.distributed.checkpoint`.

Not here: how copies come to other hosts (`edl.collective.replica`, of which nothing here knows), and
who asks for a save.
"""
