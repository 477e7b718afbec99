"""Configures gRPC for EDL. Import `grpc` from here.

gRPC's fork handlers crash the forked workers of a `DataLoader` while requests are pending in the parent. So this module
switches the handlers off before it imports `grpc`. Without the handlers, a child is safe if it does not use the
parent's channels, and EDL refuses to use these channels in a child.
"""

from __future__ import annotations

import logging
import os
import sys

_WANTED = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower()
FORK_HANDLERS = "grpc" in sys.modules and _WANTED in ("1", "true", "yes")
"""Whether gRPC was imported before EDL, with gRPC's fork handlers switched on."""

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # noqa: E402

__all__ = ["DIRECT", "FORK_HANDLERS", "grpc"]

DIRECT: tuple[tuple[str, int], ...] = (("grpc.enable_http_proxy", 0),)
"""Options of every channel. These options make gRPC ignore `http_proxy` and similar settings, which are for web access:
a proxy cannot resolve a teacher's name, would see the training data, and may close an idle stream."""


def _is_worth_telling(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    harmless = isinstance(error, BlockingIOError) or (
        isinstance(error, RuntimeError) and "loop is closed" in str(error)
    )
    return not (harmless and "PollerCompletionQueue._handle_events" in record.getMessage())


# All event loops of a process share one gRPC queue. A loop that finds it empty, or finds an event for a loop that has
# since been closed, makes asyncio log a traceback, though nothing is wrong (grpc/grpc#25364). Readers and servers have
# their own loops, so a process with two of them would log these.
logging.getLogger("asyncio").addFilter(_is_worth_telling)
