"""`Labeller`: connects to teachers, labels a whole data set in one process, and stores the labels in a folder.

A run streams batches through the teachers (`label_batches`); a thread of the session stores their labels. The run waits
for that thread before the thread's queue is full, and checks which rows have a label.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edl.datasets.rows import Batch, LabelDataset, RaggedData, SampleId
from edl.distill.cache import CacheKey, CacheView, SequenceIds, SoftLabelCache, fingerprints_of
from edl.distill.labelling.fingerprint import DataGuard
from edl.distill.options import Options
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession
from edl.distill.source.cutters import BatchCutter, Getter, SequenceColumnsCutter
from edl.distill.teachers import Teachers
from edl.distill.transport.schema import OutputSpec
from edl.errors import BadOutputError, EDLError, RejectedError, SettingsError, SourceError, TemporaryError
from edl.protocol.tensors import Array

OF_THE_ROWS = (RejectedError, BadOutputError, SourceError)  # caused by a row on any worker, not by the worker
_LOST_LABELS = "either the disk is too slow, or the teachers serve different versions of the model"
_SETTLE_EVERY = 32  # batches between two waits for the folder, at most
_LONGEST_PAUSE_S = 2.0
"""Longest pause of a failing teacher. With longer pauses, a few bad rows at the end would take minutes each, because no
other row's successful answer ends a pause early."""
_SEQUENCES_REMEDY = (
    "give it sequences (a .jsonl or .parquet file, an .npz file with --offsets, or a function with --sequences)"
)
_ROWS_REMEDY = (
    "a model that takes sequences declares edl_sequences, as those of edl serve --hf and edl register vllm:// do; "
    "give other models rows of one shape"
)


@dataclass(frozen=True)
class LabelPlan:
    """The labels to request. If several processes share a run, `output_spec` must specify the model's version."""

    teachers: Teachers
    output_spec: OutputSpec
    dataset: str = ""  # tag of `CacheKey`; a reader must use the same tag
    batch_rows: int = 32  # rows per request
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class LabelProgress:
    """Progress of a run in this process, in rows."""

    total: int | None = None  # None if unknown
    known: int = 0  # already had a label
    labelled: int = 0
    seconds: float = 0.0  # since the run began
    teachers_live: int = 0

    @property
    def rows_per_s(self) -> float:
        """Rows labelled per second."""
        return self.labelled / self.seconds if self.seconds else 0.0


class Labeller:
    """Requests labels for a data set, and stores them in the folder of `cache`. Use it for one run only."""

    _view: CacheView  # set by `key`

    def __init__(self, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> None:
        self._guard = guard
        self._data = guard.data
        self._cache = cache
        assert cache.folder is not None
        self._folder = cache.folder
        policy = replace(plan.options.policy, open_max_s=min(plan.options.policy.open_max_s, _LONGEST_PAUSE_S))
        self._plan = replace(plan, options=replace(plan.options, policy=policy))
        self._session = session_of(self._plan, cache)
        self._tell: Callable[[LabelProgress], None] = lambda _: None
        self._started = time.monotonic()
        self._known = self._labelled = 0

    def key(self, *, relabel: bool = False) -> CacheKey:
        """Wait for the first teacher's model, check the data (`DataGuard.admit`), and return the labels' key.

        Raises `NoTeacherError` if no teacher with the requested version was live for `teacher_timeout_s`. Raises
        `SettingsError` if the data and the model do not match, or if the model's version is unknown and `plan` does not
        specify one.
        """
        _check_kind(self._data, self._session)
        self._view = self._session.labeller.view(tuple(self._data.inputs))
        self._guard.admit(self._view, relabel=relabel)
        return self._view.key

    def label_all(self, tell: Callable[[LabelProgress], None] = lambda _: None) -> LabelProgress:
        """Label all rows that have no label yet. When this returns, all labels are on disk. Call `key` first.

        If the process is killed, call this again in a new process: stored labels are kept. `tell` is called after every
        batch, in this thread. Raises `ConflictError` if the data changed, `TemporaryError` if labels were not stored.
        """
        self._begin(tell)
        try:
            self._check_stored(self._label_unknown())
        except BaseException:
            with contextlib.suppress(EDLError):  # marks the folder if the data changed; a later run cannot tell
                self._guard.check_unchanged(self._view, in_job=False)
            raise
        self._cache.flush()
        self._guard.check_unchanged(self._view, in_job=False, at_end=True)
        return self._progress(self._data.rows)

    def _check_stored(self, lost: int) -> None:
        if lost:
            why = self._folder.failure or _LOST_LABELS
            raise TemporaryError(f"{lost} rows were labelled but not stored: {why}; run the same command again")

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._session.close()

    def _begin(self, tell: Callable[[LabelProgress], None]) -> None:
        self._tell = tell
        self._started = time.monotonic()

    def _progress(self, total: int | None = None) -> LabelProgress:
        seconds = time.monotonic() - self._started
        return LabelProgress(total, self._known, self._labelled, seconds, self._session.stats().teachers_live)

    def _label_unknown(self) -> int:
        lost = 0
        unsettled: list[Sequence[SampleId] | SequenceIds] = []

        def is_known(ids: list[SampleId], inputs: dict[str, Any] | None) -> Array:  # called in the feeding thread
            known = self._view.contains(lookup_of(self._data, ids, inputs))
            self._known += int(np.count_nonzero(known))
            return known

        def settle() -> None:
            nonlocal lost
            self._session.labeller.prepare_epoch()
            missing = sum(int(np.count_nonzero(~self._view.contains(ids))) for ids in unsettled)
            lost += missing
            self._labelled -= missing
            unsettled.clear()
            self._guard.check_unchanged(self._view, in_job=False)

        def answered(batch: Batch) -> None:
            unsettled.append(lookup_of(self._data, *batch))
            self._labelled += len(batch[0])
            if len(unsettled) == _SETTLE_EVERY:
                settle()
            self._tell(self._progress(self._data.rows))

        batches = self._data.batches(self._plan.batch_rows, is_known)
        label_batches(self._session, self._data, self._plan, batches, answered)
        settle()
        self._tell(self._progress(self._data.rows))
        return lost


def session_of(plan: LabelPlan, cache: SoftLabelCache) -> LabelSession:
    # The queue also has room for the answers that arrive while a run waits for the disk, so none is dropped.
    """Connect to the teachers of a plan."""
    options = replace(plan.options, cache_queue_bytes=plan.options.cache_queue_bytes + plan.options.memory_bytes)
    return LabelSession(LabelRequest(plan.output_spec, [plan.teachers], options, cache, plan.dataset))


def label_batches(
    session: LabelSession,
    data: LabelDataset,
    plan: LabelPlan,
    batches: Iterator[Batch],
    answered: Callable[[Batch], None],
) -> None:
    """Send batches of a data set to teachers, and call `answered` with each labelled batch, in order.

    Once this has returned, or has raised one of `OF_THE_ROWS`, no thread uses `batches` any longer. Raises
    `TemporaryError` if the data set is still loading a sample after `source_timeout_s`.
    """
    getters = {name: _input(name) for name in data.inputs}
    kind = SequenceColumnsCutter if data.sequences else BatchCutter
    epoch = session.start(batches, kind(getters, None, session.labeller.services, lambda batch: batch[0]))
    failure: Exception | None = None
    try:
        for number, item in enumerate(epoch, 1):
            epoch.taken(item)
            if number % _SETTLE_EVERY == 0 or session.labeller.cache_queue_bytes > plan.options.cache_queue_bytes:
                session.labeller.prepare_epoch()
            answered(item.value)
    except OF_THE_ROWS as exc:
        failure = exc
    finally:
        epoch.close()
    timeout_s = plan.options.source_timeout_s
    if not epoch.join(min(timeout_s, threading.TIMEOUT_MAX)):
        raise TemporaryError(f"the data set is still loading a sample {timeout_s:g} s after it was told to stop")
    if failure is not None:
        raise failure


def lookup_of(
    data: LabelDataset, ids: Sequence[SampleId], inputs: Mapping[str, Any] | None
) -> Sequence[SampleId] | SequenceIds:
    """Return the ids for looking up labels; for sequences in a file, with fingerprints of the loaded texts."""
    if not data.sequences:
        return ids
    if inputs is None or not isinstance(data, RaggedData):
        return SequenceIds(ids)
    columns = dict(inputs)
    positions = columns.pop(data.position_input, None)
    lengths = np.array([len(part) for part in next(iter(columns.values()))], np.int64)
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    prints = fingerprints_of(arrays, lengths, np.concatenate(positions) if positions is not None else None)
    return SequenceIds(ids, lengths, prints, tuple(sorted(columns)))


def _check_kind(data: LabelDataset, session: LabelSession) -> None:
    """Check that data and model both use rows or both use sequences; tell the data which input takes positions."""
    spec = session.labeller.model_spec()
    if bool(spec.sequences) != data.sequences:
        kinds = ("sequences", "rows") if data.sequences else ("rows", "sequences")
        raise SettingsError(
            f"the data set has {kinds[0]}, but the teachers' model {spec.name!r} takes {kinds[1]}: "
            + (_ROWS_REMEDY if data.sequences else _SEQUENCES_REMEDY)
        )
    if isinstance(data, RaggedData):
        data.position_input = spec.sequences
        odd = [name for name in data.inputs if spec.inputs and name not in spec.inputs]
        if odd:
            raise SettingsError(
                f"--inputs: the teachers' model {spec.name!r} has no input {odd[0]!r}, only {', '.join(spec.inputs)}"
            )


def _input(name: str) -> Getter:
    return lambda batch: batch[1][name]
