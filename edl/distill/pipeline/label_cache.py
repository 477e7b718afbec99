"""Looks up labels in the soft-label cache before teachers are asked, and stores answers afterwards."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.background import BackgroundLoop
from edl.distill.cache import CacheKey, CacheView, Found, RowIds, SequenceIds, SoftLabelCache, fingerprints_of
from edl.distill.cache.records import as_ids
from edl.distill.pipeline.answers import outputs_nbytes
from edl.distill.source.chunk import Chunk
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec
from edl.errors import EDLError, NoTeacherError, SettingsError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array

logger = logging.getLogger("edl.distill")

_MOST_SEEN = 1 << 16  # ids remembered, in about 8 MB; ids shared by several samples repeat among the first
_MOST_ELEMENTS = 512  # of a row, to compare: takes a tenth of the time of hashing one row in 16


class SeenInputs:
    """Detects an id that rows with different inputs share in one run, such as a class number used as an id."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}  # hash of the inputs by id

    def check(self, ids: Sequence[Any], inputs: Mapping[str, Array]) -> None:
        """Raise `SettingsError` if a row's inputs differ from those seen before under the same id."""
        total: Array = np.zeros(len(ids), np.uint64)
        for seed, (_, array) in enumerate(sorted(inputs.items())):
            rows = array.reshape(len(ids), -1)
            if rows.shape[1] > _MOST_ELEMENTS:
                rows = rows[:, np.linspace(0, rows.shape[1] - 1, _MOST_ELEMENTS, dtype=np.intp)]
            if rows.dtype.kind == "O":
                words = np.array([[hash(value) for value in row] for row in rows.tolist()], np.int64).view(np.uint64)
            else:  # by value: a request may hold samples of several dtypes
                words = (rows.astype(np.float64) + 0.0).view(np.uint64)
            total += (words ^ (words >> np.uint64(32))) @ _weights(seed, rows.shape[1])
        for sample, found in zip(ids, total.tolist(), strict=True):
            known = self._seen.get(sample)
            if known is None and len(self._seen) < _MOST_SEEN:
                self._seen[sample] = found
            elif known not in (None, found):
                raise SettingsError(
                    f"samples with different inputs have the id {sample!r}, but labels are stored by id: give each "
                    "sample its own id, such as its number in the data set (not its class), and each random "
                    "augmentation of it (edl.distill.views.AugmentedViews)"
                )


@functools.lru_cache(64)
def _weights(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).integers(1, 2**64, count, np.uint64)


class ServiceLabels:
    """A service's labels in the cache. `weights_versions`: the versions that are declared as hashes of weights."""

    def __init__(
        self,
        cache: SoftLabelCache,
        dataset: str,
        output_spec: OutputSpec,
        service: str,
        weights_versions: Collection[str] = (),
    ) -> None:
        self.cache = cache
        self._dataset = dataset
        self.inputs: tuple[str, ...] = ()  # names of all inputs that may be sent
        self._output_spec = output_spec
        self._service = service
        self._weights_versions = weights_versions
        self._seen = SeenInputs()
        self._views: dict[tuple[str, str], CacheView] = {}  # by model and version

    def key(self, spec: ModelSpec, version: str) -> CacheKey:
        of_weights = version == spec.weights_version or version in self._weights_versions
        return CacheKey(
            model=spec.name,
            version=version,
            outputs=self._output_spec.outputs,
            top_k=self._output_spec.top_k,
            temperature=self._output_spec.temperature,
            dtype=self._output_spec.dtype,
            dataset=self._dataset,
            service="" if of_weights else self._service,
            inputs=() if spec.inputs else self.inputs,
        )

    def view(self, spec: ModelSpec) -> CacheView:
        view = self._views.get((spec.name, spec.version))
        if view is None:
            view = self._views[spec.name, spec.version] = self.cache.view(self.key(spec, spec.version))
        return view

    def look_up(self, chunk: Chunk, spec: ModelSpec, fields: Mapping[str, Array]) -> CacheMiss:
        assert chunk.ids is not None
        self.inputs = self.inputs or tuple(chunk.fields)
        sent = {name: array for name, array in fields.items() if not spec.inputs or name in spec.inputs}
        ids = RowIds.of(chunk.ids, sent) if chunk.lengths is None else _sequence_ids(chunk, sent, spec.sequences)
        if isinstance(ids, RowIds):
            self._seen.check(ids, sent)
        if not spec.version:
            return CacheMiss(Found(np.zeros(len(chunk.ids), np.bool_), {}, chunk.lengths), None, ids, self, spec)
        view = self.view(spec)
        found = view.get(ids)
        return CacheMiss(found, view, _select_ids(ids, ~found.mask), self, spec)


class OfflineLabels:
    """All labels for a student without teachers, from the only view in the cache that matches `output_spec`.

    Without a dtype in `output_spec`, any dtype matches, but an exact match is preferred. Raises `SettingsError` if no
    labels match, or if labels of several models or versions match.
    """

    def __init__(self, cache: SoftLabelCache, dataset: str, output_spec: OutputSpec) -> None:
        self._seen = SeenInputs()
        fitting = [
            key
            for key in cache.keys()  # noqa: SIM118 - not a mapping
            if set(output_spec.outputs) == set(key.outputs)
            and (not output_spec.model or key.model == output_spec.model)
            and (not output_spec.version or key.version == output_spec.version)
            and (key.top_k, key.dataset) == (output_spec.top_k, dataset)
            and (output_spec.top_k is None or key.temperature == output_spec.temperature)
            and output_spec.dtype in (None, key.dtype)
            and cache.store_dtype in (None, key.dtype)
        ]
        dtype = cache.store_dtype or output_spec.dtype
        exact = [key for key in fitting if (key.outputs, key.dtype) == (output_spec.outputs, dtype)]
        for found in (fitting, exact):
            if len(found) == 1:
                self.view = cache.view(found[0])
                return
        there = "; ".join(key.to_json() for key in (fitting or cache.keys())) or "nothing"
        wanted = (
            f"outputs {list(output_spec.outputs)}, top_k={output_spec.top_k}, "
            f"temperature={output_spec.temperature:g}, dtype={dtype}, dataset={dataset!r}"
            + (f", version={output_spec.version!r}" if output_spec.version else "")
        )
        raise SettingsError(
            f"no teachers are named, and the cache {cache.path or 'in memory'} has {len(fitting)} label sets for "
            f"{wanted}; it contains: {there}"
        )

    def look_up(self, chunk: Chunk) -> Outputs:
        """Return the labels of a chunk; raise `NoTeacherError` if a label is missing."""
        assert chunk.ids is not None
        if chunk.lengths is None:
            self._seen.check(as_ids(chunk.ids), chunk.fields)
        inputs = self.view.layout.sequence_inputs if self.view.layout is not None else None
        ids: Any = chunk.ids if chunk.lengths is None else _sequence_ids(chunk, chunk.fields, POSITION, inputs)
        found = self.view.get(ids)
        if not found.complete:
            samples = ids.ids if isinstance(ids, SequenceIds) else ids
            missing = next(sample for sample, there in zip(samples, found.mask, strict=True) if not there)
            words = ", or belongs to another text," if isinstance(ids, SequenceIds) else ""
            raise NoTeacherError(
                f"the label of sample {missing!r} is not in the cache{words} and no teachers are named"
            )
        return found.outputs


def _sequence_ids(
    chunk: Chunk, fields: Mapping[str, Array], position: str, inputs: Sequence[str] | None = None
) -> SequenceIds:
    """Return the ids to look up. `inputs`: names of the cached labels' inputs; None for all of `fields`."""
    assert chunk.ids is not None
    assert chunk.lengths is not None
    sent = {name: array for name, array in fields.items() if name != position and (inputs is None or name in inputs)}
    missing = sorted({*(inputs or ())} - {*sent})
    if missing:
        raise SettingsError(
            f"the cache's labels are for texts with the inputs {list(inputs or ())}, but {missing[0]!r} is missing "
            "here: add it to the inputs (`inputs=` or `ins=`)"
        )
    prints = fingerprints_of(sent, chunk.lengths, fields.get(position))
    return SequenceIds(chunk.ids, chunk.lengths, prints, tuple(sorted(sent)))


def _select_ids(ids: RowIds | SequenceIds, mask: Array) -> RowIds | SequenceIds:
    if isinstance(ids, SequenceIds):
        return ids[mask]
    return RowIds(itertools.compress(ids, mask), ids.fingerprints)


@dataclass(frozen=True)
class CacheMiss:
    """The rows or sequences of a chunk that the cache lacks. An answer will add them."""

    found: Found  # rows that the cache has
    view: CacheView | None  # where they were looked up; None while no answer has named the model's version
    ids: RowIds | SequenceIds  # the ids that were not found
    labels: ServiceLabels  # the service's
    spec: ModelSpec  # the model for whose version the rows were looked up; other versions' labels are separate

    @property
    def rows(self) -> int:
        return int((~self.found.row_mask).sum())

    def store(self, outputs: Outputs, version: str) -> None:
        """Store the missing rows' outputs under the version of their answer.

        If the labels were looked up for a different version, rows already stored under the answer's version are
        skipped; otherwise each epoch would write them again.
        """
        ids = self.ids
        if self.view is not None and version == self.spec.version:
            self.view.put(ids, outputs)
            return
        view = self.labels.cache.view(self.labels.key(self.spec, version))
        is_new = ~view.contains(ids)
        if is_new.any():
            lengths = ids.lengths if isinstance(ids, SequenceIds) else None
            rows = np.flatnonzero(Found(is_new, {}, lengths).row_mask)
            view.put(_select_ids(ids, is_new), {name: output[rows] for name, output in outputs.items()})

    def completed(self, answer: Outputs) -> Outputs:
        return dict(self.found.filled(answer)) if self.found.outputs else answer


_SETTLE_S = 60.0  # how long the start of an epoch, or `close`, waits for a disk, so that no hang goes unnoticed
_ENTRY_NBYTES = 512  # memory of an answer besides its arrays; otherwise tiny answers would be unbounded in number
_IDLE_S = 3600.0  # how long the thread waits without work; `put` and `close` wake it


class CacheQueue:
    """Stores answers in the cache in a thread, so that training never waits for a disk.

    Rows beyond `limit_bytes` are not stored. They are counted, and requested again in the next epoch.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0  # bytes of the queued answers, including the one being stored
        self.dropped_rows = 0  # rows not stored, for any reason
        self._changed = threading.Condition()
        self._entries: deque[tuple[CacheMiss, Outputs, str, int]] = deque()  # with the version and bytes of each answer
        self._closing = False
        self._reported: set[str] = set()
        self._loop = BackgroundLoop("edl-cache", self._store_next)

    def put(self, missing: CacheMiss, outputs: Outputs, version: str) -> None:
        """Queue the outputs of missing rows, without waiting. An answer without a version cannot be stored."""
        if not version:
            self.count_dropped(missing.rows)
            return
        nbytes = _ENTRY_NBYTES + outputs_nbytes(outputs)
        with self._changed:
            is_full = self.queued_bytes > 0 and self.queued_bytes + nbytes > self.limit_bytes
            if is_full or self._closing:
                self.dropped_rows += missing.rows
            else:
                self.queued_bytes += nbytes
                self._entries.append((missing, outputs, version, nbytes))
        self._loop.wake()
        if is_full:
            self._report(
                "the soft-label cache cannot keep up: some labels are not stored and will be requested again "
                "(stats().rows_not_cached counts them). Use a faster disk, or a larger "
                f"cache_queue_bytes={self.limit_bytes}"
            )

    def count_dropped(self, rows: int) -> None:
        with self._changed:
            self.dropped_rows += rows

    def drain(self) -> bool:
        """Wait up to a minute until the queue is empty; return whether it is."""
        with self._changed:
            settled = self._changed.wait_for(lambda: not self.queued_bytes, _SETTLE_S)
        if not settled:
            logger.warning(
                "%.1f MB of labels are still being written to the soft-label cache after %g s: continuing without them",
                self.queued_bytes / 1e6,
                _SETTLE_S,
            )
        return settled

    def close(self) -> None:
        self._closing = True
        self._loop.wake()
        self._loop.wait_ended(_SETTLE_S)

    def _store_next(self) -> float | None:
        """Store the next answer; return the seconds until the next step, None at the end."""
        with self._changed:
            if not self._entries:
                return None if self._closing else _IDLE_S
            missing, outputs, version, nbytes = self._entries.popleft()
        try:
            missing.store(outputs, version)
        except Exception as exc:  # noqa: BLE001 - an answer that cannot be stored must not affect the next ones
            self.count_dropped(missing.rows)
            self._report(
                f"labels are not stored in the cache: {exc}", None if isinstance(exc, EDLError | OSError) else exc
            )
        with self._changed:
            self.queued_bytes -= nbytes
            self._changed.notify_all()
        return 0.0

    def _report(self, words: str, exc: Exception | None = None) -> None:
        if words not in self._reported and len(self._reported) < 64:  # more would flood the log
            self._reported.add(words)
            logger.warning("%s", words, exc_info=exc)
