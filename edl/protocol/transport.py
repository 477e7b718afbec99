"""gRPC as EDL uses it. Import `grpc` from here.

gRPC's fork handlers crash the forked workers of a `DataLoader` while requests are under way in the parent, so they are
switched off before its first import. A child that does not touch the parent's channels is safe without them, and EDL
refuses to touch them there.
"""

from __future__ import annotations

import os
import sys

FORK_HANDLERS = "grpc" in sys.modules and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in (
    "1",
    "true",
    "yes",
)
"""Whether somebody imported gRPC before EDL, with its fork handlers on."""

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # noqa: E402

__all__ = ["DIRECT", "FORK_HANDLERS", "grpc"]

DIRECT: tuple[tuple[str, int], ...] = (("grpc.enable_http_proxy", 0),)
"""Options of every channel to a teacher. `http_proxy` and its like are there for the way out to the web: a proxy does
not know a teacher's name, would see the training data, and may cut a stream that is quiet."""
