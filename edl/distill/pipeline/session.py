"""Runs a reader's epochs one after the other over the same connections, and publishes its load for scaling."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from edl.background import start_call
from edl.distill.pipeline.answers import item_outputs
from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.pipeline.epoch import READING, Epoch
from edl.distill.pipeline.request import LabelRequest
from edl.distill.source.chunk import Item
from edl.distill.source.cutters import Cutter
from edl.distill.source.iterator import Handover, SourceIterator
from edl.distill.stats import ReaderStats
from edl.errors import ClosedError, TemporaryError
from edl.load_reporting import LoadPublisher, LoadSource
from edl.load_reporting.records import MAX_TEACHERS
from edl.settings import DiscoverySettings, LoadSettings

logger = logging.getLogger("edl.distill")


def load_publishers(
    labeller: ChunkLabeller, open_wait: Callable[[], tuple[float, float]], settings: LoadSettings
) -> list[LoadPublisher]:
    """Start publishing a load record for each service, in that service's discovery."""
    if not settings.publish:
        return []
    sources: dict[str, list[LoadSource]] = defaultdict(list)
    for index, group in enumerate(labeller.request.teachers):
        if group.service is not None:
            url = DiscoverySettings.of(group.discovery).url
            sources[url].append(_source(labeller, index, group.service, open_wait, settings.job))
    return [LoadPublisher(url, found, settings) for url, found in sources.items()]


def _source(
    labeller: ChunkLabeller, index: int, service: str, open_wait: Callable[[], tuple[float, float]], job: str
) -> LoadSource:
    engine = labeller.engines[index]
    label_s = total_source_s = 0.0

    def read() -> Mapping[str, float]:
        """Return counters that never decrease.

        A wait that ends between the two reads is counted at the next call. If the reads were in reverse order, it would
        be counted twice.
        """
        nonlocal label_s, total_source_s
        waited_s, source_s = labeller.wait_s, labeller.source_wait_s
        open_s, open_source_s = open_wait()
        label_s = max(label_s, waited_s + open_s - source_s - open_source_s)
        total_source_s = max(total_source_s, source_s + open_source_s)
        return {"rows_asked": engine.rows_asked, "wait_s": label_s, "source_wait_s": total_source_s}

    def describe() -> Mapping[str, Any]:
        ready = sorted(name for name, teacher in engine.stats().teachers.items() if teacher.state == "ready")
        return {"job": job, "teachers": ready[:MAX_TEACHERS]}

    return LoadSource(service, "students", read, describe)


_SOURCE_STOP_S = 5.0  # for `close`: longer than loading a batch, shorter than a scheduler's grace period
_SAY_AFTER_S = 5.0  # how long to wait for a busy source before a warning


class LabelSession:
    """The epochs of a reader, one at a time."""

    def __init__(self, request: LabelRequest) -> None:
        load = LoadSettings.of(request.options.publish_load)
        self.labeller = ChunkLabeller(request)
        self._options = request.options
        self._pid = os.getpid()
        self._first_close = threading.Lock()  # taken by the first call of `close`, without waiting, and never released
        self._epoch: Epoch | None = None
        self._load_publishers = load_publishers(self.labeller, self._open_wait, load)
        _OPEN_SESSIONS.add(self)

    def stats(self) -> ReaderStats:
        epoch = self._epoch
        return replace(
            self.labeller.stats(),
            rows_buffered=epoch.rows if epoch is not None else 0,
            bytes_held=epoch.nbytes if epoch is not None else 0,
        )

    def _open_wait(self) -> tuple[float, float]:
        epoch = self._epoch
        return epoch.waiting_s if epoch is not None else (0.0, 0.0)

    def begin(
        self, source: Callable[[], Iterable[Any]], cutter: Cutter, end_source: Callable[[], None] | None = None
    ) -> Epoch:
        """End the previous epoch and start a new one; the source's iterator is created in the calling thread.

        This also ends epochs of other readers that read the same iterator, or the same loader with persistent workers.
        Raises `TemporaryError` if the source is still busy with the previous epoch after `source_timeout_s`.
        """
        self.labeller.check()
        if self._epoch is not None:
            self._end_epoch(self._epoch)
        self.labeller.begin_epoch()
        found = source()
        shared = found.given if isinstance(found, Handover) else found
        if not _has_one_iterator(shared):
            shared = None
        for epoch, read in list(READING.items()):
            if read is shared:
                self._end_epoch(epoch)
        return self.start(SourceIterator(found), cutter, end_source, shared)

    def start(
        self,
        source: Iterator[Any],
        cutter: Cutter,
        end_source: Callable[[], None] | None = None,
        shared: object = None,
    ) -> Epoch:
        """Start an epoch over an iterator. `shared`: the user's source, if all readers get the same iterator."""
        self.labeller.check()
        for route, part in cutter.routes.items():
            part.fit = functools.partial(self.labeller.rows_that_fit, route=route)
        epoch = self._epoch = Epoch(self.labeller, source, cutter, end_source)
        if self.labeller.closed:  # in another thread, before it could see this epoch
            epoch.close()
            self.labeller.check()
        epoch.start(shared)
        return epoch

    def labelled(self, epoch: Epoch) -> Generator[tuple[Item, list[Any]], None, None]:
        """Yield items with labels: an array or `TopK` per output of each service; no labels for an empty item."""
        request = self.labeller.request
        combiner = request.combiner()
        try:
            for item in epoch:
                services = range(request.services if item.parts else 0)
                combined = combiner([item_outputs(item, service) for service in services])
                epoch.taken(item)
                yield item, [outputs[name] for outputs in combined for name in request.output_spec.outputs]
        finally:
            epoch.close()

    def _end_epoch(self, epoch: Epoch) -> None:
        """End an epoch; wait until its source is free, because two threads in one iterator would split the values."""
        if epoch.is_feeding():
            raise ClosedError(
                "the data source of a reader starts an epoch of the same reader, which would end the source's own epoch"
            )
        epoch.close()
        timeout_s = self._options.source_timeout_s
        say_after_s = min(_SAY_AFTER_S, timeout_s)
        if epoch.join(say_after_s):
            return
        logger.warning(
            "the data source is still busy %g s after its epoch was ended: waiting up to %g s to start the next one",
            say_after_s,
            timeout_s,
        )
        if not epoch.join(min(timeout_s - say_after_s, threading.TIMEOUT_MAX)):
            raise TemporaryError(
                f"the data source is still busy with the previous epoch, {timeout_s:g} s after it was ended, and two "
                "epochs cannot use it at once: find out what it waits for, make it time out earlier (a DataLoader's "
                "timeout), or wait longer with Options(source_timeout_s=...)"
            )

    def close_without_waiting(self) -> None:
        """Close the session from a finalizer, which may run in any thread at any time."""
        if not self.labeller.closed and os.getpid() == self._pid:
            with contextlib.suppress(ClosedError):  # another thread may close it meanwhile
                self.labeller.thread.call(self._close_apart)

    def _close_apart(self) -> None:
        """Close the session in a separate thread. This method runs on the loop, which must be free for closing."""
        # Not `start_call`, whose thread is a daemon: the program must wait for this thread before it ends.
        threading.Thread(target=self.close, name="edl-close").start()

    def close(self) -> None:
        """End the epoch and the labeller. Has no effect in a forked child, because the parent owns them."""
        if os.getpid() != self._pid or not self._first_close.acquire(blocking=False):
            return
        self.labeller.closed = True
        _OPEN_SESSIONS.discard(self)
        for publisher in self._load_publishers:
            publisher.begin_close()
        with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one fails
            for publisher in self._load_publishers:
                stack.callback(publisher.close)
            stack.callback(self.labeller.close)
            if self._epoch is not None:
                stack.callback(self._join_source, self._epoch)
                stack.callback(self._epoch.close)

    def _join_source(self, epoch: Epoch) -> None:
        if not epoch.join(_SOURCE_STOP_S):
            logger.warning("the data source is still busy %g s after its reader was closed; giving up", _SOURCE_STOP_S)


def open_session(request: LabelRequest, keep: Callable[[LabelSession], object]) -> None:
    """Open a session and pass it to `keep`, which ensures that it is closed.

    Both steps run in another thread. In the main thread, a signal handler could raise an exception between any two
    lines, and leave a half-opened session running forever.
    """
    start_call("edl-open", lambda: keep(LabelSession(request))).result()


def _has_one_iterator(source: object) -> bool:
    """Return whether each `iter(source)` returns the same iterator, as for a loader with persistent workers.

    Generators do not count, because a generator ends with the first epoch that reads it.
    """
    persistent = getattr(source, "persistent_workers", getattr(source, "_persistent_workers", False))
    return bool(persistent) or (isinstance(source, Iterator) and not isinstance(source, Generator))


_OPEN_SESSIONS: set[LabelSession] = set()  # to close when the program ends


@atexit.register
def _close_open() -> None:
    with contextlib.ExitStack() as stack:
        for session in _OPEN_SESSIONS.copy():
            stack.callback(session.close)
