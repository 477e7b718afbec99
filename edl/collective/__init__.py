"""Elastic training from checkpoints: workers come and go, and the result does not depend on who was present.

In a training script: `State` and `Checkpointer` keep what must survive, `Evaluator` what was measured of it,
`ElasticSampler` orders the data, `ElasticTrainer` makes the update; each works without the others, and without
`edl run`. Inside:

- `agent`: one node's part of a job, `edl run`;
- `worker_status`: what a worker and its agent tell each other; `job_records`: what agents tell each other in the Store;
- `checkpoint`: what survives, in memory and on storage; `replica`: copies of it on other hosts;
- `training`: what a step trains, and the update that it makes;
- `goodput`: where the time went;
- `integrations`: Hugging Face's and Lightning's `Trainer`, loops with Accelerate, and PaddlePaddle.

Torch is imported by the parts that need it. Not here: soft labels and teachers (`edl.distill`), and
anything that knows of a cluster (`edl.master`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edl.collective.removed import describe_removal

if TYPE_CHECKING:
    from edl.collective.checkpoint.checkpointer import Checkpointer
    from edl.collective.checkpoint.evaluator import Evaluator
    from edl.collective.checkpoint.state.state import State
    from edl.collective.training.sampler import ElasticSampler
    from edl.collective.training.trainer import ElasticTrainer

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "ElasticTrainer",
    "Evaluator",
    "State",
]

_HOMES = {
    "Checkpointer": "checkpoint.checkpointer",
    "ElasticSampler": "training.sampler",
    "ElasticTrainer": "training.trainer",
    "Evaluator": "checkpoint.evaluator",
    "State": "checkpoint.state.state",
}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is asked for."""
    if name in ("Place", "run_in_process", "stay"):
        # No AttributeError: `from edl.collective import stay` would drop its words.
        raise ImportError(describe_removal(name))
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
