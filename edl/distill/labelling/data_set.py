"""Labels all of a data set in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from edl.distill.cache import CacheView, SoftLabelCache
from edl.distill.datasets.kinds import LabelDataset, SampleId
from edl.distill.labelling.plan import LabelPlan, LabelProgress, LabelReport
from edl.distill.pipeline.cache_lookup import CacheConfig
from edl.distill.pipeline.session import LabelSession
from edl.distill.source.cutters import BatchCutter, Getter
from edl.errors import TemporaryError
from edl.protocol.tensors import Array

__all__ = ["batch_cutter", "label"]

_SETTLE_EVERY = 32
"""Batches after which to wait until their labels are kept, so that none are left out because too many wait."""

_PASSES = 3
"""Tries before an error: labels that were not kept twice will not be the third time without a change."""


def label(
    data: LabelDataset,
    plan: LabelPlan,
    cache: SoftLabelCache,
    progress: Callable[[LabelProgress], None] = lambda _: None,
) -> LabelReport:
    """Ask for the labels of all rows that have none yet, and keep them in `cache`.

    May be killed at any moment and called again: at most the rows of the last `flush_interval_s` of the cache are asked
    for again. On return all labels are on disk.

    Args:
        data: the data set.
        plan: what to ask for.
        cache: where to keep the labels.
        progress: called after every batch, in this thread.

    Returns:
        The key of the labels, and counts.

    Raises:
        NoTeacherError: no teacher was live for `teacher_timeout_s`.
        TemporaryError: some labels could not be kept.
    """
    session = LabelSession([plan.teachers], plan.output_spec, plan.options, CacheConfig(cache, plan.dataset))
    try:
        view = session.labeller.view(cache, tuple(data.inputs))
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
        return LabelReport(view.key, run.progress())
    finally:
        session.close()


def batch_cutter(inputs: Sequence[str], services: int) -> BatchCutter:
    """Return what cuts the batches of a data set: pairs of ids and inputs.

    Args:
        inputs: their names.
        services: how many services are asked.
    """
    return BatchCutter({name: _input(name) for name in inputs}, None, services, lambda batch: batch[0])


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
        self._unsettled: list[SampleId] = []

    def one_pass(self, *, first: bool) -> int:
        """Label what has no label; return how many rows were answered but not kept."""
        self.lost = 0
        batches = self._data.batches(self._plan.batch_rows, lambda ids: self._is_known(ids, first))
        epoch = self._session.start(batches, batch_cutter(self._data.inputs, self._session.labeller.services))
        try:
            for number, item in enumerate(epoch, 1):
                epoch.taken(item)
                self._unsettled += item.value[0]
                self._labelled += item.rows
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
        lost = int(np.count_nonzero(~self._view.contains(self._unsettled)))
        self.lost += lost
        self._labelled -= lost
        self._unsettled = []

    def _is_known(self, ids: Sequence[SampleId], first: bool) -> Array:
        """Return which ids have a label. Called in the feeding thread."""
        known = self._view.contains(ids)
        if first:
            self._known += int(np.count_nonzero(known))
        return known


def _input(name: str) -> Getter:
    return lambda batch: batch[1][name]
