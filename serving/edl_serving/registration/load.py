"""What a teacher publishes of itself: the rows that it computed, and the seconds that it took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.discovery import Instance
from edl.load_reporting import LoadPublisher, LoadSource
from edl.settings import LoadSettings

__all__ = ["TeacherCounts", "TeacherLoad"]


@dataclass(frozen=True)
class TeacherCounts:
    """What a teacher has computed so far.

    Attributes:
        rows: that it computed; None if unknown.
        compute_s: seconds that it took, summed over workers; None if unknown.
        workers: batches that it computes at the same time.
        queue_rows: rows that wait; None if unknown.
        note: why rows are unknown; empty if they are known.
    """

    rows: int | None = 0
    compute_s: float | None = 0.0
    workers: int = 1
    queue_rows: int | None = 0
    note: str = ""


class TeacherLoad:
    """Publishes a teacher's load, from before its model is loaded until it has left.

    Args:
        url: of the discovery that the teacher registers in.
        service: that it registers as.
        settings: whether, and how often.
    """

    def __init__(self, url: str, service: str, settings: LoadSettings) -> None:
        self._state = "starting"
        self._instance: Instance | None = None
        self._count: Callable[[], TeacherCounts] = TeacherCounts
        self._counts = TeacherCounts()
        source = LoadSource(service, "teachers", self._read, self._describe)
        self._publisher = LoadPublisher(url, [source], settings) if settings.publish else None

    def set_ready(self, instance: Instance, count: Callable[[], TeacherCounts]) -> None:
        """Publish what the teacher computes from now on.

        Args:
            instance: as it is registered.
            count: returns what it has computed; called in the publisher's thread.
        """
        self._count = count
        self._instance = instance
        self.set_state("ready")

    def set_state(self, state: str) -> None:
        """Publish another state, at once.

        Args:
            state: "starting", "ready", "unhealthy" or "draining".
        """
        if state != self._state:
            self._state = state
            if self._publisher is not None:
                self._publisher.publish_soon()

    def close(self) -> None:
        """Remove the record; see `LoadPublisher.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def _read(self) -> Mapping[str, float | None]:
        self._counts = self._count()
        return {"rows": self._counts.rows, "compute_s": self._counts.compute_s}

    def _describe(self) -> Mapping[str, Any]:
        instance, counts = self._instance, self._counts
        fields = {"state": self._state, "workers": counts.workers, "queue_rows": counts.queue_rows, "note": counts.note}
        if instance is None:
            return fields
        # The path of a Unix socket says nothing to others.
        endpoint = "" if instance.address.startswith("unix:") else instance.endpoint
        version = instance.meta.get("version", "")
        return {
            **fields,
            "teacher": instance.id,
            "model": instance.model,
            "version": version,
            "endpoint": endpoint,
        }
