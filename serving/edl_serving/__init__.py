"""Serve a model to students over KServe v2 gRPC.

`Backend` is the interface of a model, `TeacherServer` serves it, and `serve` runs a server until a signal. Any KServe
v2 client can send requests, Triton's as well as `edl.distill`.

The student's side, load balancing and training are elsewhere. This package uses only public names of `edl`, and `edl`
never imports it.
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
_HOMES = {"TeacherServer": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    """Import the server on first use, so that `edl serve --help` works without the server's dependencies."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
