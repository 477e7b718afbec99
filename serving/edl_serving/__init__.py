"""Serve a model to students over KServe v2 gRPC.

`Backend` is the interface of a model, `TeacherServer` serves it, `serve` runs a server until a signal. Students,
Triton's clients and `edl.distill` are served alike.

What does not belong here: the student's side, balancing, and training. Only public names of `edl` are used, and
`edl` never imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edl.protocol import transport as _transport  # noqa: F401 - before grpc_health imports gRPC its own way
from edl_serving.backends.backend import Array, Backend, TensorSpec, TopKArrays
from edl_serving.settings import ServerSettings

if TYPE_CHECKING:
    from edl_serving.server import TeacherServer, serve

__all__ = ["Array", "Backend", "ServerSettings", "TeacherServer", "TensorSpec", "TopKArrays", "serve"]
_HOMES = {"TeacherServer": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    """Import the server when it is used: `edl serve --help` prints without what the server needs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
