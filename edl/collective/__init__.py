"""Elastic training from checkpoints: workers come and go, and the result does not depend on who was present.

In a training script: `State` and `Checkpointer` keep what must survive, `ElasticSampler` orders the data,
`ElasticTrainer` makes the update; each works without the others, and without `edl run`. With `stay` a script goes on in
the same process when others are lost. Inside:

- `run` is `edl run`; `agent` is one node's part of it: it follows the job's record (`membership`, `world`) and runs a
  `crew` of workers, forked from a `zygote`; `board` is what a worker and its agent tell each other;
- `state` is what is saved, `slots` the memory it is saved to, `checkpoint` when and how;
- `split`, `adjust`, `noise`, `goodput` and `schedule` are the decisions behind sampler and trainer;
- `ledger` says where the time went, `watch` who hangs.

Torch is imported by the parts that need it. What does not belong here: soft labels and teachers (`edl.distill`), and
anything that knows of a cluster (`edl.master`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.collective.checkpoint import Checkpointer
    from edl.collective.inprocess import stay
    from edl.collective.sampler import ElasticSampler
    from edl.collective.state import State
    from edl.collective.trainer import ElasticTrainer

__all__ = ["Checkpointer", "ElasticSampler", "ElasticTrainer", "State", "stay"]

_HOMES = {
    "Checkpointer": "checkpoint",
    "ElasticSampler": "sampler",
    "ElasticTrainer": "trainer",
    "State": "state",
    "stay": "inprocess",
}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
