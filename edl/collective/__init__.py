"""Elastic training from checkpoints: workers join and leave without changing the result.

In a training script, `State` and `Checkpointer` keep what must survive a restart, `Evaluator` keeps the results of
evaluations, `ElasticSampler` orders the data, and `ElasticTrainer` updates the parameters. Each of these classes works
without the others and without `edl run`. docs/architecture.md lists the parts. Only the parts that need torch import
torch.
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

__all__ = ["Checkpointer", "ElasticSampler", "ElasticTrainer", "Evaluator", "State"]

_HOMES = {
    "Checkpointer": "checkpoint.checkpointer",
    "ElasticSampler": "training.sampler",
    "ElasticTrainer": "training.trainer",
    "Evaluator": "checkpoint.evaluator",
    "State": "checkpoint.state.state",
}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is requested."""
    if name in ("Place", "run_in_process", "stay"):
        # Not an AttributeError: `from edl.collective import stay` would replace its message.
        raise ImportError(describe_removal(name))
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
