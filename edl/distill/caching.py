"""The soft-label cache as a reader uses it: look up before asking, keep what was answered, off the training loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edl.distill.cache import CacheKey, CacheView, Found, SoftLabelCache
from edl.distill.request import Ask, ModelSpec, Outputs
from edl.errors import EDLError, NoTeacherError, SettingsError

__all__ = ["Caching", "Keeper", "Missing", "key_of", "look_up_offline", "offline_view"]

logger = logging.getLogger("edl.distill")

_SETTLE_S = 60.0
_WAITING = 256
"""Answers that may wait to be kept. Beyond it they are not kept: training does not wait for a disk."""


@dataclass(frozen=True)
class Caching:
    """Which cache, and what its ids mean.

    Attributes:
        dataset: tells data sets, their versions and augmentations apart; see `CacheKey`.
    """

    cache: SoftLabelCache
    dataset: str = ""


def key_of(ask: Ask, spec: ModelSpec, dataset: str) -> CacheKey:
    """What the labels of this model depend on, besides the sample."""
    return CacheKey(
        model=spec.name,
        version=spec.version,
        outputs=ask.outputs,
        top_k=ask.top_k,
        temperature=ask.temperature,
        dtype=ask.dtype,
        dataset=dataset,
    )


def offline_view(caching: Caching, ask: Ask) -> CacheView:
    """The only rows in the cache that fit what is asked, for a student without teachers.

    Where nothing is said of the dtype, any fits; but those that teachers would be asked for in the same words go first.

    Raises:
        SettingsError: there are none, or those of several models or versions.
    """
    fitting = [
        key
        for key in caching.cache.keys()  # noqa: SIM118 - not a mapping
        if set(ask.outputs) == set(key.outputs)
        and (not ask.model or key.model == ask.model)
        and (key.top_k, key.dataset) == (ask.top_k, caching.dataset)
        and (ask.top_k is None or key.temperature == ask.temperature)
        and ask.dtype in (None, key.dtype)
        and caching.cache.store_dtype in (None, key.dtype)
    ]
    dtype = caching.cache.store_dtype or ask.dtype
    same_words = [key for key in fitting if (key.outputs, key.dtype) == (ask.outputs, dtype)]
    for found in (fitting, same_words):
        if len(found) == 1:
            return caching.cache.view(found[0])
    there = "; ".join(key.to_json() for key in (fitting or caching.cache.keys())) or "nothing"
    wanted = (
        f"outputs {list(ask.outputs)}, top_k={ask.top_k}, temperature={ask.temperature:g}, "
        f"dtype={dtype}, dataset={caching.dataset!r}"
    )
    raise SettingsError(
        f"no teachers are named, and the cache {caching.cache.path or 'in memory'} has {len(fitting)} sets of labels "
        f"for {wanted}; it holds: {there}"
    )


def look_up_offline(view: CacheView, ids: Sequence[Any]) -> Outputs:
    """Labels of all rows from the cache alone.

    Raises:
        NoTeacherError: some are not there.
    """
    found = view.get(ids)
    if not found.complete:
        missing = next(sample for sample, there in zip(ids, found.mask, strict=True) if not there)
        raise NoTeacherError(f"sample {missing!r} is not in the cache, and no teachers are named to ask")
    return dict(found.outputs)


class Keeper:
    """Puts answers into the cache in a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[CacheView, Sequence[Any], Outputs] | None] = queue.Queue(_WAITING)
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name="edl-cache", daemon=True)
        self._thread.start()

    def keep(self, view: CacheView, ids: Sequence[Any], outputs: Outputs) -> None:
        """Keep rows soon. Never waits: when the disk cannot follow, rows are left out, and asked for again later."""
        try:
            self._queue.put_nowait((view, ids, outputs))
        except queue.Full:
            if not self._dropped:
                logger.warning("the soft-label cache cannot follow; some labels are not kept")
            self._dropped = True

    def settle(self) -> None:
        """Wait until all that was given before is in the cache, for a minute at most."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, _SETTLE_S)

    def close(self) -> None:
        """Finish, and end the thread."""
        self._queue.put(None)
        self._thread.join(_SETTLE_S)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            view, ids, outputs = entry
            try:
                view.put(ids, outputs)
            except (EDLError, OSError) as exc:
                logger.warning("labels are not kept in the cache: %s", exc)
            finally:
                self._queue.task_done()
        self._queue.task_done()


@dataclass(frozen=True)
class Missing:
    """Rows of a chunk that the cache does not have, to be completed with their answer."""

    found: Found
    view: CacheView
    ids: Sequence[Any]

    def completed(self, answer: Outputs) -> Outputs:
        return dict(self.found.filled(answer)) if self.found.outputs else answer
