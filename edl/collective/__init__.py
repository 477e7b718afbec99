"""Elastic training from checkpoints: workers come and go, and the result does not depend on who was present.

- `run` is `edl run`; `agent` is one node's part of it: it joins the `rendezvous`, and forks workers from a `zygote`;
- `board` is what a worker and its agent tell each other, in shared memory;
- `state`, `slots` and `checkpoint` keep a step's state in memory and on storage;
- `sampler` orders the data, `trainer` makes the update, `adjust` the hyperparameters.

torch is imported when a part that needs it is, not here. What does not belong here: soft labels and teachers
(`edl.distill`), and anything that knows of a cluster (`edl.master`).
"""
