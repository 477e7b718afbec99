"""Labels all of a data set in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edl.datasets.rows import IndexedData, LabelDataset, RaggedData, SampleId
from edl.distill.cache import CacheView, SequenceIds, SoftLabelCache, fingerprints_of
from edl.distill.labelling.fingerprint import DataFingerprint
from edl.distill.labelling.plan import LabelPlan, LabelProgress, LabelReport
from edl.distill.pipeline.label_cache import CacheConfig
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession
from edl.distill.source.cutters import BatchCutter, Cutter, Getter
from edl.distill.source.sequence_cutters import SequenceColumnsCutter
from edl.errors import ConflictError, SettingsError, TemporaryError
from edl.protocol.tensors import Array

__all__ = ["batch_cutter", "check_data_set", "check_sequences", "label", "lookup_of"]

_SETTLE_EVERY = 32
"""Batches after which to wait until their labels are kept, so that none are left out because too many wait."""

_SEQUENCES_REMEDY = (
    "give it sequences (a .jsonl or .parquet file, an .npz file with --offsets, or a function with --sequences)"
)
_ROWS_REMEDY = (
    "a model of sequences says so (edl_sequences), as those of edl serve --hf and edl register vllm:// do; for others "
    "give it rows of one shape"
)
_PASSES = 3
"""Tries before an error: labels that were not kept twice will not be the third time without a change."""


def label(
    data: LabelDataset,
    plan: LabelPlan,
    cache: SoftLabelCache,
    progress: Callable[[LabelProgress], None] = lambda _: None,
    *,
    relabel: bool = False,
) -> LabelReport:
    """Ask for the labels of all rows that have none yet, and keep them in `cache`.

    May be killed at any moment and called again: at most the rows of the last `flush_interval_s` of the cache are asked
    for again. On return all labels are on disk.

    Args:
        data: the data set.
        plan: what to ask for.
        cache: where to keep the labels.
        progress: called after every batch, in this thread.
        relabel: Forget labels that are there of other data, in place of an error.

    Returns:
        The key of the labels, and counts.

    Raises:
        ConflictError: the labels that are there are of other data, or the data have changed meanwhile.
        NoTeacherError: no teacher was live for `teacher_timeout_s`.
        TemporaryError: some labels could not be kept.
    """
    cache_config = CacheConfig(cache, plan.dataset)
    session = LabelSession(LabelRequest(plan.output_spec, [plan.teachers], plan.options, cache_config))
    try:
        check_sequences(data, session)
        view = session.labeller.view(cache, tuple(data.inputs))
        fingerprint = DataFingerprint.of(data)
        check_data_set(view, data, fingerprint, relabel=relabel)
        view.verify()
        run = _Run(data, plan, session, view, progress)
        for number in range(_PASSES):
            if not run.one_pass(first=number == 0):
                break
        else:
            raise TemporaryError(
                f"{run.lost} rows were labelled, but their labels were not kept: either the disk cannot follow, or "
                "the teachers serve different versions of the model; run the same command again"
            )
        cache.flush()
        _check_unchanged(view, data, fingerprint)
        return LabelReport(view.key, run.progress())
    finally:
        session.close()


def check_data_set(view: CacheView, data: LabelDataset, fingerprint: DataFingerprint, *, relabel: bool = False) -> None:
    """Check that labels which are there are of these data, and write down that they are.

    Data that grew at their end are the same. Sequences are not checked: each label tells which text it is of.

    Args:
        view: where the labels are.
        data: the data set.
        fingerprint: of the data set.
        relabel: Forget the labels of other data, in place of an error.

    Raises:
        ConflictError: they are of other data.
    """
    if data.sequences:
        return
    text = view.data_set
    try:
        there = DataFingerprint.from_json(text) if text else fingerprint
    except ValueError:
        there = fingerprint
    here = fingerprint
    if isinstance(data, IndexedData) and 0 < there.rows < fingerprint.rows:
        here = DataFingerprint.of(data, there.rows)
    found = here.differences(there, "where they were labelled")
    if found and not relabel:
        raise ConflictError(
            f"the folder has labels of other data: {'; '.join(found)}. Name another folder or --dataset, or pass "
            "--relabel to have all rows labelled again"
        )
    if found or text != fingerprint.to_json():
        view.note_data_set(fingerprint.to_json(), relabel=bool(found))


def _check_unchanged(view: CacheView, data: LabelDataset, before: DataFingerprint) -> None:
    """Check that nobody has written to the data while they were labelled, which may have mixed two versions.

    Raises:
        ConflictError: They have changed. The folder is marked, so that later runs refuse its labels too.
    """
    found = [] if data.sequences else DataFingerprint.of(data).differences(before, "when this run began")
    if found:
        view.note_data_set(replace(before, rows_checksum="changed while it was labelled").to_json(), relabel=False)
        raise ConflictError(
            f"the data set has changed while it was labelled: {'; '.join(found)}. The folder may have labels of both; "
            "pass --relabel to have all rows labelled again"
        )


def batch_cutter(data: LabelDataset, services: int) -> Cutter:
    """Return what cuts the batches of a data set: pairs of ids and inputs.

    Args:
        data: the data set.
        services: how many services are asked.
    """
    getters = {name: _input(name) for name in data.inputs}
    kind = SequenceColumnsCutter if data.sequences else BatchCutter
    return kind(getters, None, services, lambda batch: batch[0])


def check_sequences(data: LabelDataset, session: LabelSession) -> None:
    """Check that a data set of sequences goes with the model; waits for the first teacher.

    Args:
        data: the data set; told which input of the model holds positions.
        session: of the teachers.

    Raises:
        SettingsError: the model has no such input, or rows of it are no tokens; or the other way round.
        NoTeacherError: no teacher told within `teacher_timeout_s` what its model is.
    """
    spec = session.labeller.model_spec()
    if bool(spec.sequences) != data.sequences:
        kinds = ("sequences", "rows") if data.sequences else ("rows", "sequences")
        raise SettingsError(
            f"the data set has {kinds[0]}, and the teachers' model {spec.name!r} takes {kinds[1]}: "
            + (_ROWS_REMEDY if data.sequences else _SEQUENCES_REMEDY)
        )
    if isinstance(data, RaggedData):
        data.position_input = spec.sequences
        odd = [name for name in data.inputs if spec.inputs and name not in spec.inputs]
        if odd:
            raise SettingsError(
                f"--inputs: the teachers' model {spec.name!r} has no input {odd[0]!r}, only {', '.join(spec.inputs)}"
            )


def lookup_of(
    data: LabelDataset, ids: Sequence[SampleId], inputs: Mapping[str, Any] | None
) -> Sequence[SampleId] | SequenceIds:
    """Return what tells whether samples have labels. A sequence of a file is known if its label is of the same text.

    Args:
        data: The data set.
        ids: Ids of the samples.
        inputs: Their inputs; None where they are not loaded.
    """
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


class _Run:
    """A call of `label`: its passes over the data set."""

    def __init__(
        self,
        data: LabelDataset,
        plan: LabelPlan,
        session: LabelSession,
        view: CacheView,
        tell: Callable[[LabelProgress], None],
    ) -> None:
        self._data = data
        self._plan = plan
        self._session = session
        self._view = view
        self._tell = tell
        self._started = time.monotonic()
        self._known = self._labelled = self.lost = 0
        self._unsettled: list[Sequence[SampleId] | SequenceIds] = []

    def one_pass(self, *, first: bool) -> int:
        """Label what has no label; return how many rows were answered but not kept."""
        self.lost = 0
        batches = self._data.batches(self._plan.batch_rows, lambda *batch: self._is_known(batch, first))
        epoch = self._session.start(batches, batch_cutter(self._data, self._session.labeller.services))
        try:
            for number, item in enumerate(epoch, 1):
                epoch.taken(item)
                self._unsettled.append(lookup_of(self._data, *item.value))
                self._labelled += len(item.value[0])
                if number % _SETTLE_EVERY == 0:
                    self._settle()
                self._tell(self.progress())
        finally:
            epoch.close()
        self._settle()
        self._tell(self.progress())
        return self.lost

    def progress(self) -> LabelProgress:
        """Return how far it is."""
        return LabelProgress(
            self._data.rows,
            self._known,
            self._labelled,
            time.monotonic() - self._started,
            self._session.stats().teachers_live,
        )

    def _settle(self) -> None:
        """Check that what was answered has been kept."""
        self._session.labeller.prepare_epoch()
        lost = sum(int(np.count_nonzero(~self._view.contains(ids))) for ids in self._unsettled)
        self.lost += lost
        self._labelled -= lost
        self._unsettled = []

    def _is_known(self, batch: tuple[list[SampleId], dict[str, Any] | None], first: bool) -> Array:
        """Return which ids have a label. Called in the feeding thread."""
        known = self._view.contains(lookup_of(self._data, *batch))
        if first:
            self._known += int(np.count_nonzero(known))
        return known


def _input(name: str) -> Getter:
    return lambda batch: batch[1][name]
