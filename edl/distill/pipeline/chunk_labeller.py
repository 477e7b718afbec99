"""Labels chunks of rows with one or several services; engines, shared memory and cache outlive epochs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from edl.distill.cache import CacheView, SequenceIds
from edl.distill.engine.compatibility import outputs_disagreement
from edl.distill.engine.engine import Engine, LabelJob
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.pipeline.answers import AnswerSizeEstimator, outputs_nbytes
from edl.distill.pipeline.label_cache import CacheMiss, CacheQueue, OfflineLabels, ServiceLabels
from edl.distill.pipeline.request import LabelRequest
from edl.distill.source.chunk import Chunk
from edl.distill.stats import ReaderStats, merged
from edl.distill.teachers import Teachers, TeacherWatcher, service_identities
from edl.distill.transport.calls import current_traceparent, rows_that_fit
from edl.distill.transport.request import Payload, select_inputs
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec
from edl.distill.transport.shm import Arena
from edl.errors import ClosedError, EDLError, SettingsError, SourceError
from edl.memory import keep_freed_memory
from edl.protocol.names import POSITION, SEQUENCES
from edl.protocol.tensors import Array
from edl.protocol.tls import CredentialFiles
from edl.quoting import listed
from edl.settings import Credentials

logger = logging.getLogger("edl.distill")

_EXCESS = 2
"""Multiple of `memory_bytes` that answers may take before requests are cancelled. With 1, variations in text length
would often cause requests to be cancelled, and teachers' work to be wasted."""
_CLOSE_S = 10.0  # for the connections of a service; gRPC takes milliseconds, and a hanging host is abandoned


_SAY_AFTER_S = 5.0  # how long to wait for a first teacher before logging it: when a person begins to wonder
_LOOK_S = 0.2  # how often a wait checks whether it should continue


@dataclass(eq=False)
class _Service:
    engine: Engine
    output_spec: OutputSpec
    labels: ServiceLabels | None  # labels in the cache; None without a cache
    sizes: AnswerSizeEstimator
    watcher: TeacherWatcher
    submitted: int = 0  # chunks; written by the feeding thread only
    agreed: tuple[ModelSpec, str] | None = None  # the model and tokenizer whose outputs match the other routes'


class ChunkLabeller:
    """A reader's connections, shared memory and cache. Only `submit` must be called in the feeding thread.

    A route is the number of the only service that labels a row; None if all services label it. Methods that wait for
    teachers stop waiting once `stopped` returns True. They raise `NoTeacherError` at their deadline, and
    `SettingsError` as soon as all teachers have answered and none can serve the request (`Engine.lacking`).
    """

    def __init__(self, request: LabelRequest) -> None:
        options = request.options
        self.request = request
        self.services = request.services  # number of answers per chunk
        self.memory_bytes, self.linger_s = options.memory_bytes, options.linger_s
        credentials = Credentials.of() if options.credentials is None else options.credentials
        # Wrong credentials raise here, in the constructor.
        self._files = CredentialFiles.of(credentials) if request.teachers else None
        self.thread = EventLoopThread.acquire(for_grpc=bool(request.teachers))
        self._offline: OfflineLabels | None = None
        self._cache_queue: CacheQueue | None = None
        self._arena: Arena | None = None
        self._pid = os.getpid()
        self.closed = False  # whether new work is refused
        self._numbers = itertools.count()
        self._delivered = self._cached = 0
        self.wait_s = 0.0  # seconds that the training loop waited so far
        self.source_wait_s = 0.0  # seconds of these for the data source
        self._progress_at = time.monotonic() + options.progress_s
        self._progress_rows = 0
        keep_freed_memory(min(options.memory_bytes, 512 << 20))  # the user's memory limit applies to freed memory too
        self.engines: list[Engine] = []
        self._services: list[_Service] = []
        self._timeout_s = options.teacher_timeout_s
        self._warned_unversioned = False
        self._epoch_begins = False
        self._traceparent = ""
        try:
            if request.cache is not None:
                if not request.teachers:
                    self._offline = OfflineLabels(request.cache, request.dataset, request.output_spec)
                self._cache_queue = CacheQueue(options.cache_queue_bytes)
            if options.shared_memory:
                self._arena = Arena(2 * options.memory_bytes)
            identities = service_identities(request.teachers)
            for group, identity in zip(request.teachers, identities, strict=True):
                self._add_service(group, identity)
        except BaseException:
            self.close()
            raise

    def _add_service(self, group: Teachers, identity: str) -> None:
        request = self.request
        output_spec = replace(
            request.output_spec,
            model=group.model or request.output_spec.model,
            priority=group.priority,
            version=group.version or request.output_spec.version,
        )
        engine = Engine(
            group.described,
            output_spec,
            request.options,
            thread=self.thread,
            arena=self._arena,
            files=self._files,
        )
        self.engines.append(engine)
        labels = None
        if request.cache is not None:
            versions = engine.compatibility.weights_versions
            labels = ServiceLabels(request.cache, request.dataset, output_spec, identity, versions)
        watcher = TeacherWatcher(group, functools.partial(self.thread.call, engine.set_teachers))
        self._services.append(_Service(engine, output_spec, labels, AnswerSizeEstimator(), watcher))

    def check(self) -> None:
        if self.closed:
            raise ClosedError("the reader is closed")
        self.thread.check()

    # The teachers' limits, known once the first is connected

    def asked(self, route: int | None) -> range:
        return range(len(self.engines)) if route is None else range(route, route + 1)

    def knows_teacher(self, route: int | None) -> bool:
        return all(self.engines[index].await_spec(0.0) is not None for index in self.asked(route))

    def max_rows(self, stopped: Callable[[], bool], route: int | None = None) -> int:
        """Return the largest number of rows per request that a route's teachers accept; 0 for any number."""
        known = [index for index in self.asked(route) if self.await_spec(index, stopped) is not None]
        return min(filter(None, (self.engines[index].pool.limits.max_rows for index in known)), default=0)

    def max_sequence(self, route: int | None = None) -> int:
        """Return the length of the longest sequence that every service has a teacher for; 0 for any length."""
        return min(filter(None, (self.engines[at].pool.limits.max_sequence for at in self.asked(route))), default=0)

    def rows_that_fit(self, fields: Mapping[str, Array], route: int | None = None) -> int:
        """Return how many rows of this size fit in a request to any teacher of a route; 0 for any number."""
        fitting = [
            rows_that_fit(fields, spec, max_nbytes)
            for engine in (self.engines[index] for index in self.asked(route))
            if (max_nbytes := engine.pool.limits.max_nbytes) and (spec := engine.await_spec(0)) is not None
        ]
        return min(fitting, default=0)

    def awaits_sequence(self, rows: int, since: float, route: int | None = None) -> bool:
        """Return whether to wait for a teacher that accepts a sequence too long for all known teachers.

        With a fixed list of teachers, wait only while some are still connecting; with a service, always wait, because
        teachers come and go.
        """
        short = [at for at in self.asked(route) if rows > self.engines[at].pool.limits.max_sequence > 0]
        if not short or time.monotonic() - since > self._timeout_s:
            return False
        return all(self.request.teachers[at].service is not None or self.engines[at].awaits_teachers for at in short)

    def await_max_sequence(self, rows: int, stopped: Callable[[], bool], route: int | None = None) -> int:
        begin = time.monotonic()
        warned = False
        asked = self.asked(route)
        while not stopped() and self.awaits_sequence(rows, begin, route):
            for index in asked:
                self.engines[index].wait_changed(_LOOK_S / len(asked))
            if not warned and time.monotonic() - begin > _SAY_AFTER_S:
                warned = True
                logger.warning(
                    "a sequence has %d tokens, but the known teachers accept at most %d: waiting up to %g s for "
                    "another",
                    rows,
                    self.max_sequence(route),
                    self._timeout_s,
                )
        return self.max_sequence(route)

    def lacks_teacher(self, since: float, route: int | None = None) -> bool:
        """Return whether a service of a route has had no teacher yet; raise an error if waiting is useless."""
        for index in self.asked(route):
            if self.engines[index].await_spec(0.0) is None:
                error = self._useless(index, since)
                if error is not None:
                    raise error
                return True
        return False

    def _useless(self, index: int, since: float) -> EDLError | None:
        """Return why to stop waiting for a service's first teacher; None to continue."""
        engine = self.engines[index]
        return engine.lacking() or (engine.no_teacher() if time.monotonic() - since > self._timeout_s else None)

    def await_spec(self, index: int, stopped: Callable[[], bool]) -> ModelSpec | None:
        """Wait for a service's first teacher; return the teacher's model, or None if `stopped` was True first."""
        begin = time.monotonic()
        engine = self.engines[index]
        warned = False
        while not stopped():
            spec = engine.await_spec(0.0)
            if spec is not None:
                return spec
            error = self._useless(index, begin)
            if error is not None:
                raise error
            if not warned and time.monotonic() - begin > _SAY_AFTER_S:
                warned = True
                found = engine.pool.describe()
                logger.warning("no teacher of %s yet (%s): waiting up to %g s", engine.name, found, self._timeout_s)
            engine.await_spec(_LOOK_S)
        return None

    def model_spec(self) -> ModelSpec:
        spec = self.await_spec(0, lambda: self.closed)
        if spec is None:
            raise ClosedError("the reader is closed")
        return spec

    # Limits on pending work

    @property
    def depth(self) -> int:
        """Number of chunks to keep open, so that a teacher that is four times slower does not block the others."""
        capacities = [engine.capacity for engine in self.engines]
        return max(8, 4 * (sum(capacities) if self.request.router is not None else max(capacities, default=0)))

    def backlog(self, route: int | None) -> float:
        """Return the number of unsent chunks of a route's service, divided by a sufficient number.

        If `route` is None, the service with the most unsent chunks counts. At 1, the feeding thread pauses, because
        more chunks would only evict warm memory from the CPU's caches.
        """
        asked = self.asked(route)
        waiting = max((self._services[at].submitted - self.engines[at].dispatched for at in asked), default=0)
        return waiting / (2 + self.depth // 16)

    def estimate_answers(self, chunk: Chunk) -> None:
        for answer, index in enumerate(self.asked(chunk.route)):
            spec = self.engines[index].await_spec(0.0)
            nbytes = self._services[index].sizes.expected(chunk.rows)
            chunk.answers_nbytes[answer] = nbytes or 0
            # Labels are looked up once the version is known, which some models report only in answers.
            knows_version = spec is None or spec.version or self.engines[index].compatibility.is_unversioned
            chunk.foreseen = chunk.foreseen and nbytes is not None and (chunk.ids is None or bool(knows_version))

    def limit_answers(self, chunks: Collection[Chunk], needed: Collection[Chunk], *, limited: bool) -> bool:
        """Cancel pending requests beyond `memory_bytes`, assuming that answers are as large as the last answers.

        The requests of the newest open `chunks` are cancelled and sent again later; those of the two oldest chunks and
        of the `needed` chunks are not. Call this on the loop. It returns whether some requests wait; pass the result to
        the next call as `limited`.
        """
        done = [chunk for chunk in chunks if chunk.done or not chunk.jobs]
        pending = sorted((chunk for chunk in chunks if chunk.jobs and not chunk.done), key=lambda each: each.jobs[0][1])
        sizes = [self._expected_weight(chunk) for chunk in pending]
        nbytes = sum(chunk.weight for chunk in done)
        if not limited and nbytes + sum(sizes) <= _EXCESS * self.memory_bytes:
            return False
        last = math.inf
        for place, (chunk, size) in enumerate(zip(pending, sizes, strict=True), len(done)):
            nbytes += size
            if place >= 2 and nbytes > self.memory_bytes and chunk not in needed:
                awaited = [other.jobs[-1][1] for other in pending if other in needed]
                last = max([chunk.jobs[0][1] - 1, *awaited])
                break
        for engine in self.engines:
            engine.send_until(last)
        return last < math.inf

    def _expected_weight(self, chunk: Chunk) -> int:
        """Return a chunk's size in bytes, assuming that its pending answers are as large as the last answers."""
        weight = chunk.weight
        for slot, index in enumerate(self.asked(chunk.route)):
            if chunk.outputs[slot] is None:
                expected = self._services[index].sizes.expected(chunk.rows) or 0
                weight += max(expected - chunk.answers_nbytes[slot], 0)
        return weight

    def submit(self, chunk: Chunk, changed: Callable[..., None], stopped: Callable[[], bool]) -> int:
        """Request the chunk's labels from its services; return by how many bytes cached answers exceed the estimate.

        `changed` is called when the chunk has been sent, and when it may be done; after an answer, it is called with
        the number of bytes by which the answer exceeds the estimate.
        """
        surplus_nbytes = 0
        if self._offline is not None and chunk.ids is not None:
            surplus_nbytes = _store(chunk, 0, self._offline.look_up(chunk))
            self._cached += chunk.rows
        for slot, index in enumerate(self.asked(chunk.route)):
            service = self._services[index]
            engine = service.engine
            spec = self.await_spec(index, stopped)
            if spec is None:
                break
            if self.request.router is not None and service.agreed != (spec, engine.compatibility.tokenizer):
                self._check_agreement(index, spec)
            fields: Mapping[str, Array] = chunk.fields
            if chunk.lengths is not None or spec.sequences:
                fields = sequence_fields(spec, chunk)
            missing = self._look_up(chunk, service, spec, fields)
            if missing is not None and missing.found.complete:
                surplus_nbytes += _store(chunk, slot, dict(missing.found.outputs), service.sizes)
                continue
            fields = select_inputs(spec, fields)
            longest_sequence = chunk.longest_sequence
            if missing is not None and missing.found.outputs:
                wanted = ~missing.found.row_mask
                fields = {name: array[wanted] for name, array in fields.items()}
                if isinstance(missing.ids, SequenceIds) and missing.ids.lengths is not None:
                    longest_sequence = int(missing.ids.lengths.max())
            # A cached label must match the bytes read with the id, so they are copied before a later send.
            arena = self._arena if engine.wants_arena else None
            payload = Payload.of(fields, arena, copy=missing is not None, batch_rows=spec.batch_rows)
            payload.traceparent = self._traceparent
            payload.longest_sequence = longest_sequence
            number = next(self._numbers)
            chunk.jobs.append((index, number))
            service.submitted += 1
            take = functools.partial(self._take_answer, chunk, slot, service.sizes, missing, changed)
            engine.submit(LabelJob(number, payload, take, changed))
        changed()
        return surplus_nbytes

    def _take_answer(
        self,
        chunk: Chunk,
        slot: int,
        sizes: AnswerSizeEstimator,
        missing: CacheMiss | None,
        changed: Callable[..., None],
        result: Outputs | EDLError,
        version: str,
    ) -> None:
        surplus_nbytes = 0
        if isinstance(result, EDLError):
            chunk.error = result
        else:
            try:
                whole = result if missing is None else missing.completed(result)
            except SettingsError as exc:
                chunk.error = exc
            else:
                surplus_nbytes = _store(chunk, slot, whole, sizes)
                if missing is not None and self._cache_queue is not None:
                    self._cache_queue.put(missing, result, version)
        changed(surplus_nbytes)

    def _check_agreement(self, index: int, spec: ModelSpec) -> None:
        """Check that a route's outputs match those of other routes, because a batch may mix routes."""
        service = self._services[index]
        tokenizer = service.engine.compatibility.tokenizer
        for other, known in enumerate(self._services):
            if known.agreed is None or other == index:
                continue
            known_spec = replace(known.agreed[0], tokenizer=known.agreed[1])
            why = outputs_disagreement(replace(spec, tokenizer=tokenizer), known_spec, service.output_spec)
            if why:
                values = f"{self._values_of(other)} and of {self._values_of(index)}"
                raise SettingsError(f"the teachers of {values} cannot be combined: {why}")
        service.agreed = spec, tokenizer

    def _values_of(self, route: int) -> str:
        return listed([repr(value) for value, index in (self.request.routes or {}).items() if index == route])

    def follow_version(self, service: int) -> None:
        """Switch to the teachers' current version outside an epoch. Call it when no request is pending."""
        engine = self.engines[service]
        with contextlib.suppress(ClosedError):  # another thread may close this meanwhile
            self.thread.call(engine.compatibility.begin_epoch)
            engine.select_version()

    def has_live_teacher(self, service: int) -> bool:
        return bool(self.engines[service].stats().teachers_live)

    @property
    def refuses_versions(self) -> bool:
        return self.request.options.mixed_versions == "refuse"

    def _look_up(
        self, chunk: Chunk, service: _Service, spec: ModelSpec, fields: Mapping[str, Array]
    ) -> CacheMiss | None:
        """Look up a chunk's labels in the cache; return None if its labels cannot be cached."""
        engine = service.engine
        if service.labels is None or self._cache_queue is None or chunk.ids is None:
            return None
        if not spec.version and engine.compatibility.is_unversioned:
            self._cache_queue.count_dropped(chunk.rows)
            if not self._warned_unversioned:
                self._warned_unversioned = True
                logger.warning(
                    "the teachers of %s do not report their model version: their labels are not "
                    "cached, since they could not be told apart from another model's. Set the version with "
                    "version=",
                    engine.name,
                )
            return None
        if spec.sequences and chunk.lengths is None:
            raise SourceError(
                f"rows of the teachers' model {spec.name!r} belong to sequences: a row's label depends on earlier "
                "rows, so labels cannot be cached row by row. Set the source with set_sequence_generator or "
                "set_sequence_list_generator, pass tokens= to distill, or use no cache"
            )
        engine.compatibility.check_cacheable(chunk.fields)
        missing = service.labels.look_up(chunk, spec, fields)
        self._cached += int(missing.found.row_mask.sum())
        return missing

    def view(self, inputs: tuple[str, ...]) -> CacheView:
        """Wait for the first teacher of the only service; return the cache view of its labels for `inputs`.

        Raises `SettingsError` if that teacher does not report a version.
        """
        spec, service = self.model_spec(), self._services[0]
        assert service.labels is not None
        if not spec.version:
            raise SettingsError(
                f"the teachers of {service.engine.name} do not report their version of model {spec.name!r}, "
                "and labels are stored by version: set it with --model-version (version=)"
            )
        service.labels.inputs = inputs
        return service.labels.view(spec)

    @property
    def cache_queue_bytes(self) -> int:
        return self._cache_queue.queued_bytes if self._cache_queue is not None else 0

    def prepare_epoch(self) -> None:
        """Wait until the previous epoch's answers are cached; then switch to the teachers' current version."""
        if self._cache_queue is not None:
            self._cache_queue.drain()
        elif not self.refuses_versions:
            return
        if self._epoch_begins:
            self._epoch_begins = False
            for engine in self.engines:
                engine.select_version()

    def set_awaited(self, chunk: Chunk) -> None:
        for index, number in chunk.jobs:
            self.thread.call(self.engines[index].set_awaited, number)

    def cancel(self, chunks: Iterable[Chunk]) -> None:
        numbers: dict[int, list[int]] = {}
        for chunk in chunks:
            for index, number in chunk.jobs:
                numbers.setdefault(index, []).append(number)
        if self.closed or os.getpid() != self._pid:
            return
        with contextlib.suppress(ClosedError):  # another thread may close this meanwhile
            for index, gone in numbers.items():
                self.thread.call(self.engines[index].cancel, gone)

    def record_delivery(self, rows: int) -> None:
        self._delivered += rows
        now = time.monotonic()
        if now >= self._progress_at:
            rate = (self._delivered - self._progress_rows) / (now - self._progress_at + self.request.options.progress_s)
            logger.info("%s, %.0f rows/s", self.stats().line(), rate)
            self._progress_at = now + self.request.options.progress_s
            self._progress_rows = self._delivered

    def stats(self) -> ReaderStats:
        services = [engine.stats() for engine in self.engines]
        return replace(
            merged(services),
            routes={value: services[index] for value, index in (self.request.routes or {}).items()},
            rows_cached=self._cached,
            rows_delivered=self._delivered,
            wait_s=self.wait_s,
            source_wait_s=self.source_wait_s,
            rows_not_cached=self._cache_queue.dropped_rows if self._cache_queue is not None else 0,
            cache_queue_bytes=self.cache_queue_bytes,
        )

    def begin_epoch(self) -> None:
        """Record that an epoch begins. The epoch's requests belong to the trace span of the calling thread."""
        self._epoch_begins = True
        self._traceparent = current_traceparent()
        for engine in self.engines:
            self.thread.call(engine.compatibility.begin_epoch)

    def close(self) -> None:
        """End connections, threads and shared memory. Call it once, in the process that created the object."""
        self.closed = True
        with contextlib.ExitStack() as stack:  # every step runs, even if an earlier one fails
            if self._arena is not None:
                stack.callback(self._arena.close)
            if self._cache_queue is not None:
                stack.callback(self._cache_queue.close)
            stack.callback(self.thread.release)
            for engine in self.engines:
                stack.callback(self._close_engine, engine)
            for service in self._services:
                stack.callback(service.watcher.close)

    def _close_engine(self, engine: Engine) -> None:
        self.thread.run(engine.close(), _CLOSE_S)


def sequence_fields(spec: ModelSpec, chunk: Chunk) -> Mapping[str, Array]:
    """Return a chunk's fields, with the positions of its rows if the source has none.

    Raises `SourceError` if sequences are sent to a model that takes rows, or rows to a model that takes sequences.
    """
    name = spec.sequences
    if chunk.positions is not None:
        if not name:
            raise SourceError(
                f"the teachers' model {spec.name!r} does not declare its rows as tokens of sequences ({SEQUENCES}), "
                "so it may treat pieces of a sequence, or several sequences, as one: serve it with edl serve --hf, "
                "by edl register vllm:// or sglang://, or as a function (--callable, --factory) with the attribute "
                f"sequence_input = {POSITION!r}, its INT32 input that is 0 at the start of a sequence. Models of "
                "--torchscript, --torch-export, --torch-factory and --paddle, and servers other than EDL's, cannot "
                "declare this"
            )
        if name in spec.inputs and name not in chunk.fields:
            return {**chunk.fields, name: chunk.positions}
        begins = chunk.fields[name][chunk.positions == 0] if name in chunk.fields else chunk.positions[:0]
        if begins.any():  # else a teacher might read two sequences as one
            raise SourceError(
                f"input {name!r} is {begins[begins != 0][0]} where a sequence begins: it must be 0 there and rise by "
                "1. Positions of a batch padded on the left often count its padding. Omit them from the inputs, and "
                "each sequence gets its own positions"
            )
    if name and (name not in chunk.fields or chunk.fields[name].flat[0] != 0):
        raise SourceError(
            f"rows of the teachers' model {spec.name!r} belong to sequences, which must not be split: set the "
            "source with set_sequence_generator or set_sequence_list_generator, or pass tokens= to distill"
        )
    return chunk.fields


def _store(chunk: Chunk, slot: int, outputs: Outputs, sizes: AnswerSizeEstimator | None = None) -> int:
    """Store and count a chunk's outputs before delivery; return by how many bytes they exceed the estimate."""
    nbytes = outputs_nbytes(outputs)
    surplus_nbytes = nbytes - chunk.answers_nbytes[slot]
    chunk.answers_nbytes[slot] = nbytes
    if sizes is not None:
        sizes.came(chunk.rows, nbytes)
    chunk.outputs[slot] = outputs
    return surplus_nbytes
