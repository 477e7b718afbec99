"""Elastic training steps: which samples a step trains, and how a step updates parameters, for any number of ranks.

`sampler` decides which rank trains which samples, and `trainer` updates the parameters, one `step` at a time.
`learning_rate` adapts the learning rate when the batch changes, and `tuner` chooses the batch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.collective.training.learning_rate import AdaScale, Linear, SampleSchedule, SquareRoot
    from edl.collective.training.tuner import AutoBatch

__all__ = ["AdaScale", "AutoBatch", "Linear", "SampleSchedule", "SquareRoot"]


def __getattr__(name: str) -> Any:
    """Import a submodule only when one of its names is used: submodules need FSDP, which is slow to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "tuner" if name == "AutoBatch" else "learning_rate"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
