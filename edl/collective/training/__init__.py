"""The data and the update: what a step trains, and how it changes the parameters, with any number of ranks.

`sampler` says which rank trains what; `trainer` makes the update, a `step` at a time; `learning_rate` says what changes
when the batch does, and `tuner` chooses the batch. Not here: who is present, and what survives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.collective.training.learning_rate import AdaScale, Linear, SampleSchedule, SquareRoot
    from edl.collective.training.tuner import AutoBatch

__all__ = ["AdaScale", "AutoBatch", "Linear", "SampleSchedule", "SquareRoot"]

_HOMES = {
    "AdaScale": "learning_rate",
    "AutoBatch": "tuner",
    "Linear": "learning_rate",
    "SampleSchedule": "learning_rate",
    "SquareRoot": "learning_rate",
}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
