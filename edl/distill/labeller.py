"""Soft labels for chunks of rows, from one service or several: engines, shared memory and the cache behind one front.

A `Labeller` belongs to one reader and lives across its epochs. It is started by the first and ended by `close`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from edl.discovery.registry import Snapshot
from edl.distill.actions import Policy
from edl.distill.arena import Arena
from edl.distill.cache import CacheView
from edl.distill.caching import Caching, Keeper, Missing, key_of, look_up_offline, offline_view
from edl.distill.engine import Engine
from edl.distill.epoch import Epoch
from edl.distill.job import Job
from edl.distill.loop import LoopThread
from edl.distill.request import Ask, ModelSpec, Outputs, Payload, select_inputs
from edl.distill.source import Chunk, Cutter
from edl.distill.stats import ReaderStats, merged
from edl.distill.teachers import Following, Teachers
from edl.errors import ClosedError, EDLError, SettingsError
from edl.memory import keep_freed_memory
from edl.settings import is_above_zero

__all__ = ["Labeller", "Options"]

logger = logging.getLogger("edl.distill")

_CLOSE_S = 10.0
_SAY_AFTER_S = 5.0


@dataclass(frozen=True)
class Options:
    """How a reader goes about its work. Durations in seconds.

    Attributes:
        teacher_timeout_s: raise `NoTeacherError` when no teacher was live for so long.
        memory_bytes: inputs held ahead of the training loop, at most.
        shared_memory: use it for teachers on this host.
        progress_s: log a line of progress (logger `edl.distill`, level INFO) every so often.
        policy: windows, hedging, retries.
    """

    teacher_timeout_s: float = 60.0
    memory_bytes: int = 512 << 20
    shared_memory: bool = True
    progress_s: float = 30.0
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        for name in ("teacher_timeout_s", "progress_s"):
            value = getattr(self, name)
            if not is_above_zero(value):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")
        if not isinstance(self.memory_bytes, int) or self.memory_bytes < 1 << 20:
            raise SettingsError(
                f"memory_bytes={self.memory_bytes!r}: must be a whole number of bytes, at least one MiB ({1 << 20})"
            )
        if not isinstance(self.policy, Policy):
            raise SettingsError(f"policy={self.policy!r}: expected an edl.distill.actions.Policy")


class Labeller:
    """See the module. `submit` is for the feeding thread, the rest for any."""

    def __init__(self, teachers: list[Teachers], ask: Ask, options: Options, caching: Caching | None = None) -> None:
        self.teachers = teachers
        self._thread = LoopThread.acquire(for_grpc=bool(teachers))
        self._caching = caching
        self._offline: CacheView | None = None
        self._keeper: Keeper | None = None
        self._arena: Arena | None = None
        self.memory_bytes = options.memory_bytes
        self._options = options
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._delivered = self._cached = self._buffered = 0
        self._wait_s = 0.0
        self._progress_at, self._progress_rows = time.monotonic() + options.progress_s, 0
        keep_freed_memory()
        self._engines: list[Engine] = []
        self._following: list[Following] = []
        self._epoch: Epoch | None = None
        self._begins = False
        self._submitted = [0] * len(teachers)  # written by the feeding thread only
        try:
            if caching is not None:
                self._offline = offline_view(caching, ask) if not teachers else None
                self._keeper = Keeper()
            if options.shared_memory:
                self._arena = Arena(2 * options.memory_bytes)
            for group in teachers:
                self._add(group, replace(ask, model=group.model or ask.model))
        except BaseException:
            self.close()
            raise

    def _add(self, group: Teachers, ask: Ask) -> None:
        engine = Engine(
            group.described,
            ask,
            thread=self._thread,
            arena=self._arena,
            policy=self._options.policy,
            teacher_timeout_s=self._options.teacher_timeout_s,
        )
        self._engines.append(engine)

        def changed(snapshot: Snapshot) -> None:
            self._thread.call(engine.set_teachers, snapshot)

        self._following.append(Following(group, changed))

    @property
    def services(self) -> int:
        """How many answers each chunk gets."""
        return max(len(self.teachers), 1)

    @property
    def depth(self) -> int:
        """Chunks to have open: enough that a teacher four times slower than the rest does not stop them."""
        return max(8, 4 * max((engine.room for engine in self._engines), default=0))

    @property
    def backlog(self) -> float:
        """Chunks that wait to be sent; 1 is enough. More would only push warm memory out of the caches.

        Where chunks gather to be sent together, it is enough when the next ones are there by then.
        """
        pairs = zip(self._submitted, self._engines, strict=True)
        waiting = max((submitted - engine.taken_up for submitted, engine in pairs), default=0)
        together = max((engine.gathers for engine in self._engines), default=0)
        return waiting / max(2 + self.depth // 16, 1 + together)

    def check(self) -> None:
        """Raise `ClosedError` if closed, or in a forked child."""
        if self._closed:
            raise ClosedError("the reader is closed")
        self._thread.check()

    def submit(self, chunk: Chunk, changed: Callable[[], None], stopped: Callable[[], bool]) -> None:
        """Ask every service for the chunk's labels; `changed` is called when it may be done, or was sent.

        Raises:
            NoTeacherError: no teacher told what its model looks like within `teacher_timeout_s`.
            SourceError: the model cannot take these inputs.
        """
        self._buffered += chunk.rows
        if self._offline is not None and chunk.ids is not None:
            chunk.outputs[0] = look_up_offline(self._offline, chunk.ids)
            self._cached += chunk.rows
        for index, engine in enumerate(self._engines):
            spec = self._spec(engine, stopped)
            if spec is None:
                return
            missing = self._look_up(chunk, engine, spec)
            if missing is not None and missing.found.complete:
                chunk.outputs[index] = dict(missing.found.outputs)
                continue
            fields = select_inputs(spec, chunk.fields)
            if missing is not None and missing.found.outputs:
                fields = {name: array[~missing.found.mask] for name, array in fields.items()}
            payload = Payload.of(fields, self._arena if engine.wants_arena else None)
            number = next(self._numbers)
            chunk.jobs.append((index, number))
            self._submitted[index] += 1
            answer = _Answer(chunk, index, changed, spec.version, missing, self._keeper)
            engine.submit(Job(number, payload, answer, changed))
        changed()

    def max_rows(self, stopped: Callable[[], bool]) -> int:
        """Rows that teachers take in one request, 0 if any number. Waits for them, and fails, as `submit` does."""
        limits = [engine.max_rows for engine in self._engines if self._spec(engine, stopped) is not None]
        return min((limit for limit in limits if limit), default=0)

    def _look_up(self, chunk: Chunk, engine: Engine, spec: ModelSpec) -> Missing | None:
        if self._caching is None or chunk.ids is None:
            return None
        engine.check_cacheable(chunk.fields)
        view = self._caching.cache.view(key_of(engine.ask, spec, self._caching.dataset))
        found = view.get(chunk.ids)
        self._cached += int(found.mask.sum())
        ids = [sample for sample, there in zip(chunk.ids, found.mask, strict=True) if not there]
        return Missing(found, view, ids)

    def model(self, service: int = 0) -> ModelSpec:
        """What the teachers of a service say of their model; waits for the first of them.

        Raises:
            NoTeacherError: none told within `teacher_timeout_s`.
        """
        spec = self._spec(self._engines[service], lambda: self._closed)
        if spec is None:
            raise ClosedError("the reader is closed")
        return spec

    def settle(self) -> None:
        """Before an epoch: let the cache take in the answers of the one before, and follow the teachers' version."""
        if self._keeper is None:
            return
        self._keeper.settle()
        if self._begins:
            self._begins = False
            for engine in self._engines:
                engine.follow_version()

    def wanted(self, chunk: Chunk) -> None:
        """The training loop waits for this chunk now."""
        for index, number in chunk.jobs:
            self._thread.call(self._engines[index].wanted, number)

    def cancel(self, chunks: Iterable[Chunk]) -> None:
        """Nobody wants these chunks any more."""
        numbers: dict[int, list[int]] = {}
        for chunk in chunks:
            self._buffered -= chunk.rows
            for index, number in chunk.jobs:
                numbers.setdefault(index, []).append(number)
        if self._closed or os.getpid() != self._pid:
            return
        for index, gone in numbers.items():
            self._thread.call(self._engines[index].cancel, gone)

    def delivered(self, rows: int) -> None:
        """So many rows went to the training loop."""
        self._delivered += rows
        self._buffered -= rows
        now = time.monotonic()
        if now >= self._progress_at:
            rate = (self._delivered - self._progress_rows) / (now - self._progress_at + self._options.progress_s)
            logger.info("%s, %.0f rows/s", self.stats().line(), rate)
            self._progress_at, self._progress_rows = now + self._options.progress_s, self._delivered

    def waited(self, seconds: float) -> None:
        """The training loop waited so long."""
        self._wait_s += seconds

    def stats(self) -> ReaderStats:
        """Counters of this reader."""
        return replace(
            merged(engine.stats() for engine in self._engines),
            rows_cached=self._cached,
            rows_delivered=self._delivered,
            rows_buffered=max(self._buffered, 0),
            wait_s=self._wait_s,
        )

    def begin(self, source: Callable[[], Iterable[Any]], cutter: Cutter) -> Epoch:
        """Start an epoch, with an iterator made in the calling thread, after the one before it has ended."""
        self.check()
        if self._epoch is not None:
            self._epoch.close()
        self._begins = True
        for engine in self._engines:
            self._thread.call(engine.begin_epoch)
        self._epoch = Epoch(self, iter(source()), cutter)
        return self._epoch

    def let_go(self) -> None:
        """`close` for a finalizer, which may run in any thread, also in one that `close` waits for."""
        if threading.current_thread().name.startswith("edl-"):
            threading.Thread(target=self.close, name="edl-close").start()
        else:
            self.close()

    def close(self) -> None:
        """End connections, threads and shared memory. Does nothing in a forked child, whose parent owns them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as stack:  # each step is taken, whatever becomes of those before it
            if self._arena is not None:
                stack.callback(self._arena.close)
            if self._keeper is not None:
                stack.callback(self._keeper.close)
            stack.callback(self._thread.release)
            for engine in self._engines:
                stack.callback(self._close_engine, engine)
            for following in self._following:
                stack.callback(following.close)
            if self._epoch is not None:
                stack.callback(self._epoch.close)

    def _close_engine(self, engine: Engine) -> None:
        self._thread.run(engine.close(), _CLOSE_S)

    def _spec(self, engine: Engine, stopped: Callable[[], bool]) -> ModelSpec | None:
        """Wait for the first teacher; None if the epoch was closed meanwhile."""
        begin, timeout_s = time.monotonic(), self._options.teacher_timeout_s
        told = False
        while not stopped():
            spec = engine.await_spec(0.2)
            if spec is not None:
                return spec
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                raise engine.no_teacher()
            if not told and waited_s > _SAY_AFTER_S:
                told = True
                logger.warning("no teacher of %s has answered yet: waiting up to %g s", engine.name, timeout_s)
        return None


@dataclass(frozen=True)
class _Answer:
    """Puts a job's outputs into its chunk, on the loop, and has them kept."""

    chunk: Chunk
    service: int
    changed: Callable[[], None]
    version: str
    missing: Missing | None
    keeper: Keeper | None

    def __call__(self, result: Outputs | EDLError, version: str) -> None:
        if isinstance(result, EDLError):
            self.chunk.error = result
        else:
            self._take(result, version)
        self.changed()

    def _take(self, outputs: Outputs, version: str) -> None:
        if self.missing is None:
            self.chunk.outputs[self.service] = outputs
            return
        try:
            self.chunk.outputs[self.service] = self.missing.completed(outputs)
        except SettingsError as exc:
            self.chunk.error = exc
            return
        if self.keeper is not None and version == self.version:
            self.keeper.keep(self.missing.view, self.missing.ids, outputs)
