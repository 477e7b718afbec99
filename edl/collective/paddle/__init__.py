"""Elastic training with PaddlePaddle, under `edl run --framework paddle`.

`training` has the state of Paddle's objects and its checkpointer, `fields` what is saved of them; `environment` is what
trainers find there. Paddle is imported when a public name is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.collective.paddle.training import Checkpointer, PaddleState, init_parallel_env

__all__ = ["Checkpointer", "PaddleState", "init_parallel_env"]


def __getattr__(name: str) -> Any:
    """Import Paddle only when a name that needs it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl.collective.paddle import training

    return getattr(training, name)
