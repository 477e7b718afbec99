"""Elastic training with PaddlePaddle (`edl run --framework paddle`). Paddle is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.collective.integrations.paddle import Checkpointer, PaddleState, init_parallel_env

__all__ = ["Checkpointer", "PaddleState", "init_parallel_env"]


def __getattr__(name: str) -> Any:
    """Import Paddle only when a name that needs it is requested."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl.collective.integrations import paddle

    return getattr(paddle, name)
