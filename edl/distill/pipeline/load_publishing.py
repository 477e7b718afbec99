"""What a reader publishes of itself: the rows that it asked of a service, and how long its training loop waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.load_reporting import LoadPublisher, LoadSource
from edl.load_reporting.records import MAX_TEACHERS
from edl.settings import DiscoverySettings, LoadSettings

__all__ = ["StudentWaits", "load_publishers"]


class StudentWaits:
    """Seconds that a reader's training loop waited, with the wait that goes on. For a single thread.

    Args:
        finished: returns the seconds of waits that have ended, and how many of them were for the data source.
        open_wait: returns the same of the wait that goes on.
    """

    def __init__(
        self, finished: Callable[[], tuple[float, float]], open_wait: Callable[[], tuple[float, float]]
    ) -> None:
        self._finished = finished
        self._open_wait = open_wait
        self._label_s = 0.0
        self._source_s = 0.0

    def read(self) -> tuple[float, float]:
        """Return the seconds waited for labels and for the data source, neither of which ever falls.

        In this order a wait that ends between the two looks is missing for a moment, and counts at the next read; in
        the other order it would count twice, for good.
        """
        waited_s, source_s = self._finished()
        open_s, open_source_s = self._open_wait()
        self._label_s = max(self._label_s, waited_s + open_s - source_s - open_source_s)
        self._source_s = max(self._source_s, source_s + open_source_s)
        return self._label_s, self._source_s


def load_publishers(
    labeller: ChunkLabeller, open_wait: Callable[[], tuple[float, float]], settings: LoadSettings
) -> list[LoadPublisher]:
    """Start publishing a reader's load: a record for each of its services, in that service's discovery.

    Args:
        labeller: of the reader.
        open_wait: returns the seconds that the training loop waits by now, and how many of them for the data source.
        settings: whether, and how often.

    Returns:
        The publishers, which the caller closes; none where teachers are fixed endpoints.
    """
    if not settings.publish:
        return []
    sources: dict[str, list[LoadSource]] = defaultdict(list)
    for index, group in enumerate(labeller.teachers):
        if group.service is not None:
            url = DiscoverySettings.of(group.discovery).url
            sources[url].append(_source(labeller, index, group.service, open_wait, settings.job))
    return [LoadPublisher(url, found, settings) for url, found in sources.items()]


def _source(
    labeller: ChunkLabeller, index: int, service: str, open_wait: Callable[[], tuple[float, float]], job: str
) -> LoadSource:
    waits = StudentWaits(lambda: labeller.waits_s, open_wait)

    def read() -> Mapping[str, float]:
        label_s, source_s = waits.read()
        return {"rows_asked": labeller.rows_asked(index), "wait_s": label_s, "source_wait_s": source_s}

    def describe() -> Mapping[str, Any]:
        return {"job": job, "teachers": labeller.ready_teachers(index)[:MAX_TEACHERS]}

    return LoadSource(service, "students", read, describe)
