"""Joins the shards that a job's master hands out to the labeller, which knows nothing of masters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from edl.distill.labelling import RowShard, ShardSource
from edl.errors import NoMasterError
from edl.master.client import Shard, ShardReader

__all__ = ["MasterShards"]

logger = logging.getLogger(__name__)


class MasterShards(ShardSource):
    """The shards of a reader.

    Args:
        reader: of the job's data set, with explicit reports.
        timeout_s: how long to wait for a master that is away.
        on_done: called once, when the first shard is done.
    """

    def __init__(self, reader: ShardReader, timeout_s: float, on_done: Callable[[], None]) -> None:
        self._reader: Final = reader
        self._timeout_s = timeout_s
        self._on_done: Callable[[], None] | None = on_done

    def take(self, timeout_s: float) -> RowShard | None:
        """See `ShardSource.take`.

        Raises:
            NoMasterError: the master was away for too long.
        """
        shard = self._reader.take(timeout_s)
        if shard is not None:
            return RowShard(shard.start, shard.stop, shard)
        if self._reader.away_s > self._timeout_s:
            raise NoMasterError(
                f"no master has answered for {self._timeout_s:g} s: what is labelled is on disk, and the same command "
                "goes on when the store answers"
            )
        return None

    @property
    def finished(self) -> bool:
        """See `ShardSource.finished`."""
        return self._reader.finished

    def report_done(self, shard: RowShard) -> None:
        """See `ShardSource.report_done`. Does not wait: a report that is lost costs that the rows are looked up again.

        Labels that are on disk stay there, whatever the master says: a refusal is logged by the reader.
        """
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done()
        self._reader.report_done(_lease(shard), wait=False)

    def report_failed(self, shard: RowShard, reason: str) -> None:
        """See `ShardSource.report_failed`."""
        self._reader.report_failed(_lease(shard), reason, wait=False)


def _lease(shard: RowShard) -> Shard:
    assert isinstance(shard.lease, Shard)
    return shard.lease
