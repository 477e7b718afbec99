"""A reader's use of the soft-label cache: labels are looked up before teachers are asked, and stored afterwards.

A `CacheQueue` writes answers into the cache in a thread of its own, so that training never waits for a disk. The queue
has a limit in bytes. Rows beyond it are dropped and counted, and teachers are asked again for them in the next epoch.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edl.background import BackgroundLoop
from edl.distill.cache import CacheKey, CacheView, Found, RowIds, SequenceIds, SoftLabelCache, fingerprints_of
from edl.distill.pipeline.answers import outputs_nbytes
from edl.distill.source.chunk import Chunk
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec
from edl.errors import EDLError, NoTeacherError, SettingsError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array

logger = logging.getLogger("edl.distill")

_MOST_SEEN = 1 << 16
"""Ids whose inputs are remembered, in about 8 MB. Ids that stand for several samples repeat among the first of them."""
_MOST_ELEMENTS = 512
"""Elements of a row that are looked at: this takes a tenth of the time that hashing one row in 16 does."""


@dataclass(frozen=True)
class CacheConfig:
    """A cache, and the data set that its ids refer to."""

    cache: SoftLabelCache
    dataset: str = ""  # distinguishes data sets, their versions and augmentations; see `CacheKey`

    def __post_init__(self) -> None:
        if not isinstance(self.cache, SoftLabelCache):
            raise SettingsError(
                f"cache={self.cache!r}: expected an edl.distill.cache.SoftLabelCache, such as SoftLabelCache(path=...)"
            )


class SeenInputs:
    """Notices an id under which rows with other inputs come in one run, such as the number of a class."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}  # hash of the inputs by id

    def check(self, ids: Sequence[Any], inputs: Mapping[str, Array]) -> None:
        """Check that rows have the inputs that came with their ids before.

        Raises:
            SettingsError: An id stands for differing inputs.
        """
        total: Array = np.zeros(len(ids), np.uint64)
        for seed, (_, array) in enumerate(sorted(inputs.items())):
            rows = array.reshape(len(ids), -1)
            if rows.shape[1] > _MOST_ELEMENTS:
                rows = rows[:, np.linspace(0, rows.shape[1] - 1, _MOST_ELEMENTS, dtype=np.intp)]
            if rows.dtype.kind == "O":
                words = np.array([[hash(value) for value in row] for row in rows.tolist()], np.int64).view(np.uint64)
            else:  # by value: samples of several types may come together in a request
                words = (rows.astype(np.float64) + 0.0).view(np.uint64)
            total += (words ^ (words >> np.uint64(32))) @ _weights(seed, rows.shape[1])
        for sample, found in zip(ids, total.tolist(), strict=True):
            known = self._seen.get(sample)
            if known is None and len(self._seen) < _MOST_SEEN:
                self._seen[sample] = found
            elif known not in (None, found):
                raise SettingsError(
                    f"samples with differing inputs come under the id {sample!r}, and labels are kept by id: give each "
                    "sample an id of its own, such as its number in the data set (not its class), and each random "
                    "augmentation of it (edl.distill.views.AugmentedViews)"
                )


@functools.lru_cache(64)
def _weights(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).integers(1, 2**64, count, np.uint64)


@dataclass(frozen=True)
class CacheKeyTemplate:
    """Key of a service's labels without the model's version."""

    output_spec: OutputSpec  # what the student asks for
    dataset: str  # see `CacheKey`
    service: str  # see `CacheKey`
    inputs: tuple[str, ...] = ()  # names of all inputs that may be sent
    # versions that teachers of the service declared to be hashes of the weights
    weights_versions: Collection[str] = ()

    def key(self, spec: ModelSpec, version: str) -> CacheKey:
        """Return the key of the labels of a version of the model."""
        of_weights = version == spec.weights_version or version in self.weights_versions
        return CacheKey(
            model=spec.name,
            version=version,
            outputs=self.output_spec.outputs,
            top_k=self.output_spec.top_k,
            temperature=self.output_spec.temperature,
            dtype=self.output_spec.dtype,
            dataset=self.dataset,
            service="" if of_weights else self.service,
            inputs=() if spec.inputs else self.inputs,
        )


def open_view(cache: SoftLabelCache, key: CacheKey, own: Collection[str]) -> CacheView:
    """Return the view of a key. If it has no rows yet, warn of labels of the same model from another service."""
    there = cache.keys()
    beside = [other for other in there if replace(other, service=key.service) == key and other.service not in own]
    if beside and key not in there:
        logger.warning(
            "soft-label cache %s: labels of model %r version %r that were kept for %s are not used for %r: the same "
            "version of another service may be another model",
            cache.path or "in memory",
            key.model,
            key.version,
            " and ".join(repr(other.service) if other.service else "a service not named" for other in beside),
            key.service,
        )
    return cache.view(key)


def offline_view(cache_config: CacheConfig, output_spec: OutputSpec) -> CacheView:
    """Return the only view in the cache that matches the specification, for a student without teachers.

    Without a dtype in `output_spec` any dtype matches, but labels with exactly the same specification go first.

    Raises:
        SettingsError: There are no matching labels, or they are from several models or versions.
    """
    fitting = [
        key
        for key in cache_config.cache.keys()  # noqa: SIM118 - not a mapping
        if set(output_spec.outputs) == set(key.outputs)
        and (not output_spec.model or key.model == output_spec.model)
        and (not output_spec.version or key.version == output_spec.version)
        and (key.top_k, key.dataset) == (output_spec.top_k, cache_config.dataset)
        and (output_spec.top_k is None or key.temperature == output_spec.temperature)
        and output_spec.dtype in (None, key.dtype)
        and cache_config.cache.store_dtype in (None, key.dtype)
    ]
    dtype = cache_config.cache.store_dtype or output_spec.dtype
    same_words = [key for key in fitting if (key.outputs, key.dtype) == (output_spec.outputs, dtype)]
    for found in (fitting, same_words):
        if len(found) == 1:
            return cache_config.cache.view(found[0])
    there = "; ".join(key.to_json() for key in (fitting or cache_config.cache.keys())) or "nothing"
    wanted = (
        f"outputs {list(output_spec.outputs)}, top_k={output_spec.top_k}, temperature={output_spec.temperature:g}, "
        f"dtype={dtype}, dataset={cache_config.dataset!r}"
        + (f", version={output_spec.version!r}" if output_spec.version else "")
    )
    raise SettingsError(
        f"no teachers are named, and the cache {cache_config.cache.path or 'in memory'} has {len(fitting)} sets of "
        f"labels for {wanted}; it holds: {there}"
    )


def look_up_offline(view: CacheView, chunk: Chunk) -> Found:
    """Return the labels of all rows from the cache alone.

    Raises:
        NoTeacherError: Some labels are missing.
        SettingsError: The labels are for sequences and the chunk is not, or they are for other inputs.
    """
    ids = chunk_ids(chunk, chunk.fields, POSITION, view.layout.sequence_inputs if view.layout is not None else None)
    found = view.get(ids)
    if not found.complete:
        samples = ids.ids if isinstance(ids, SequenceIds) else ids
        missing = next(sample for sample, there in zip(samples, found.mask, strict=True) if not there)
        words = ", or is that of another text," if isinstance(ids, SequenceIds) else ""
        raise NoTeacherError(f"the label of sample {missing!r} is not in the cache{words} and no teachers are named")
    return found


def chunk_ids(
    chunk: Chunk, fields: Mapping[str, Array], position: str, inputs: Sequence[str] | None = None
) -> Sequence[Any] | SequenceIds:
    """Return the ids to look up a chunk's labels.

    For sequences, `inputs` are the names of the inputs that the cached labels belong to; None for all of `fields`.
    """
    assert chunk.ids is not None
    if chunk.lengths is None:
        return chunk.ids
    sent = {name: array for name, array in fields.items() if name != position and (inputs is None or name in inputs)}
    missing = sorted({*(inputs or ())} - {*sent})
    if missing:
        raise SettingsError(
            f"the cache's labels are of texts with the inputs {list(inputs or ())}, and {missing[0]!r} is missing "
            "here: name it in `ins` (inputs=)"
        )
    prints = fingerprints_of(sent, chunk.lengths, fields.get(position))
    return SequenceIds(chunk.ids, chunk.lengths, prints, tuple(sorted(sent)))


@dataclass(frozen=True)
class CacheMiss:
    """The rows or sequences of a chunk that the cache lacks, to be completed with an answer."""

    found: Found  # rows that the cache has
    view: CacheView | None  # where they were looked up; None if no answer has told the model's version yet
    ids: Sequence[Any] | SequenceIds  # the missing ones
    cache: SoftLabelCache  # the view's cache
    labels: CacheKeyTemplate  # key of the labels without the version
    spec: ModelSpec  # the model for whose version the rows were looked up; labels of another version are kept apart

    @property
    def rows(self) -> int:
        """Rows that are missing."""
        return int((~self.found.row_mask).sum())

    def store(self, outputs: Outputs, version: str) -> None:
        """Store the outputs of the missing rows under the version of their answer; rows that are there are left out.

        They are there if that version is not the one that was looked up: they would be written again in every epoch.
        """
        ids = self.ids
        if self.view is not None and version == self.spec.version:
            self.view.put(ids, outputs)
            return
        view = self.cache.view(self.labels.key(self.spec, version))
        is_new = ~view.contains(ids)
        if is_new.any():
            lengths = ids.lengths if isinstance(ids, SequenceIds) else None
            rows = np.flatnonzero(Found(is_new, {}, lengths).row_mask)
            view.put(select_ids(ids, is_new), {name: output[rows] for name, output in outputs.items()})

    def completed(self, answer: Outputs) -> Outputs:
        """Return the outputs of all rows, from the cache and the answer."""
        return dict(self.found.filled(answer)) if self.found.outputs else answer


_SETTLE_S = 60.0
"""How long the start of an epoch, or `close`, waits for a disk. With more, training would stand still unnoticed."""

_ENTRY_NBYTES = 512
"""Memory of an answer in addition to its arrays. Without counting it, the number of tiny answers would be unbounded."""
_IDLE_S = 3600.0
"""How long the thread waits without work; `put` and `close` wake it."""


class CacheQueue:
    """A thread that stores answers in the cache, and its queue, which holds `limit_bytes` or a single larger answer."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0  # bytes of the queued answers, including the one being stored
        self.dropped_rows = 0  # rows that were not stored, for any reason
        self._changed = threading.Condition()
        self._entries: deque[tuple[CacheMiss, Outputs, str, int]] = deque()  # with the version and bytes of each answer
        self._closing = False
        self._reported: set[str] = set()
        self._loop = BackgroundLoop("edl-cache", self._store_next)

    def put(self, missing: CacheMiss, outputs: Outputs, version: str) -> None:
        """Queue the outputs of missing rows, without waiting. An answer without a version cannot be stored.

        If the disk cannot keep up, rows are dropped and requested again later.
        """
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
                "the soft-label cache cannot follow: some labels are not kept, and will be asked for again "
                "(stats().rows_not_cached counts them). A faster disk helps, or a larger "
                f"cache_queue_bytes={self.limit_bytes}"
            )

    def count_dropped(self, rows: int) -> None:
        """Count rows that cannot be stored."""
        with self._changed:
            self.dropped_rows += rows

    def drain(self) -> bool:
        """Wait for up to a minute until all queued rows are in the cache; return whether they are."""
        with self._changed:
            settled = self._changed.wait_for(lambda: not self.queued_bytes, _SETTLE_S)
        if not settled:
            logger.warning(
                "%.1f MB of labels are still on their way into the soft-label cache after %g s: going on without them",
                self.queued_bytes / 1e6,
                _SETTLE_S,
            )
        return settled

    def close(self) -> None:
        """Store the queued rows and end the thread. May be called twice."""
        self._closing = True
        self._loop.wake()
        self._loop.wait_ended(_SETTLE_S)

    def _store_next(self) -> float | None:
        """Store an answer, in the thread; return the seconds until the next, None at the end."""
        with self._changed:
            if not self._entries:
                return None if self._closing else _IDLE_S
            missing, outputs, version, nbytes = self._entries.popleft()
        try:
            missing.store(outputs, version)
        except Exception as exc:  # noqa: BLE001 - an answer that cannot be stored must not cost those behind it
            self.count_dropped(missing.rows)
            self._report(
                f"labels are not kept in the cache: {exc}", None if isinstance(exc, EDLError | OSError) else exc
            )
        with self._changed:
            self.queued_bytes -= nbytes
            self._changed.notify_all()
        return 0.0

    def _report(self, words: str, exc: Exception | None = None) -> None:
        if words not in self._reported and len(self._reported) < 64:  # more would not be read
            self._reported.add(words)
            logger.warning("%s", words, exc_info=exc)


def select_ids(ids: Sequence[Any] | SequenceIds, mask: Array) -> Sequence[Any] | SequenceIds:
    """Return some of the ids."""
    if isinstance(ids, SequenceIds):
        return ids[mask]
    found = [sample for sample, wanted in zip(ids, mask, strict=True) if wanted]
    return RowIds(found, ids.fingerprints) if isinstance(ids, RowIds) else found
