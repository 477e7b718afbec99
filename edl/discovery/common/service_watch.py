"""A watch of a service, over a server that answers when there is something new."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from edl.discovery.common.blocking_watch import BlockingWatch, WatchSource
from edl.discovery.common.service_view import ServiceView
from edl.discovery.registry import Snapshot, Watch

__all__ = ["BlockingServiceWatch"]


class BlockingServiceWatch(BlockingWatch[Snapshot, Snapshot], Watch):
    """Hands out what a `ServiceView` believes of a service.

    Args:
        service: its name.
        source: a connection of this watch's own; closing it must end a query that is under way.
        query: as of a `BlockingWatch`.
    """

    def __init__(
        self, service: str, source: WatchSource, query: Callable[[int | None, float], tuple[int, Snapshot]]
    ) -> None:
        view = ServiceView(service)
        super().__init__(
            source,
            query,
            answered=lambda snapshot: view.answered(snapshot, time.monotonic()),
            failed=view.failed,
            recheck_at=lambda: view.recheck_at,
        )

    @override
    def get(self, timeout_s: float | None = None) -> Snapshot | None:
        return self.take(timeout_s)
