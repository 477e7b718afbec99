"""Serve a model to students over KServe v2 gRPC.

`Backend` is the interface of a model, `TeacherServer` serves it, and `serve` runs a server until a signal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edl.protocol import transport as _transport  # noqa: F401 - before grpc_health imports gRPC its own way
from edl.protocol.tensors import Array
from edl_serving.backends.backend import Backend, TensorSpec, TopKArrays
from edl_serving.settings import ServerSettings

if TYPE_CHECKING:
    from edl_serving.server import TeacherServer, serve

__all__ = ["Array", "Backend", "ServerSettings", "TeacherServer", "TensorSpec", "TopKArrays", "serve"]


def __getattr__(name: str) -> Any:
    """Import the server on first use, so that `edl serve --help` works without the server's dependencies."""
    if name not in ("TeacherServer", "serve"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.server"), name)
