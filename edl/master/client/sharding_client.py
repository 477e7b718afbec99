"""The API of ElasticDL and DLRover, as a thin layer over `ShardReader`.

Names and semantics are those of `ShardingClient` and `IndexShardingClient` in DLRover's
elastic_agent/sharding/client.py, and of ElasticDL's `DataShardService`, from which DLRover's classes are derived. The
docstrings note any differences.
"""

from __future__ import annotations

import base64
import collections
import json
import threading
from typing import NamedTuple

from edl.datasets import ShardSettings, open_dataset
from edl.errors import SettingsError
from edl.master.client.conversation import Shard
from edl.master.client.master_client import MasterClient
from edl.master.client.shard_reader import ShardReader


class IndexRange(NamedTuple):
    """Result of `fetch_shard`: the samples [start, end) of the data set `name`."""

    name: str
    start: int
    end: int


class ShardingClient(ShardReader):
    """A `ShardReader` of sample indices, which are reported batch by batch. Thread-safe.

    Args:
        client: Client of the job.
        dataset_name: Name of the data set, which is created if it does not exist.
        batch_size: Samples in a batch.
        num_epochs: Passes over the data.
        dataset_size: Samples in the data set.
        shuffle: Shuffle the shards of each epoch.
        num_minibatches_per_shard: Batches in a shard.
        holder: Displayed name.

    Raises:
        SettingsError: An argument is invalid.
        ConflictError: A different data set already has this name.
    """

    def __init__(
        self,
        client: MasterClient,
        dataset_name: str,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 10,
        holder: str | None = None,
    ) -> None:
        if batch_size < 1 or num_minibatches_per_shard < 1:
            raise SettingsError("batch_size and num_minibatches_per_shard must be at least 1")
        settings = ShardSettings(shard_size=batch_size * num_minibatches_per_shard, epochs=num_epochs, shuffle=shuffle)
        client.create_dataset(dataset_name, open_dataset(f"range:{dataset_size}", settings))
        super().__init__(client, dataset_name, holder=holder, prefetch=1, explicit=True)
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._pending: collections.deque[Shard] = collections.deque()
        self._counted = 0
        self._indices: collections.deque[int] = collections.deque()
        self._epoch = 0

    def fetch_shard(self) -> IndexRange | None:
        """Wait for a shard; report its samples with `report_batch_done`.

        Returns:
            The shard; None if none is left.

        Raises:
            PoisonedShardsError: No shard is left, and some shards were given up.
        """
        self._check()
        shard = next(self, None)
        if shard is None:
            return None
        with self._lock:
            self._pending.append(shard)
            self._epoch = shard.epoch
        return IndexRange(self.dataset, shard.start, shard.stop)

    def fetch_sample_index(self) -> int | None:
        """Wait for the index of a sample.

        Returns:
            The index; None if none is left (DLRover raises StopIteration).

        Raises:
            PoisonedShardsError: See `fetch_shard`.
        """
        while True:
            with self._lock:
                if self._indices:
                    return self._indices.popleft()
            shard = self.fetch_shard()
            if shard is None:
                return None
            with self._lock:
                self._indices.extend(range(shard.start, shard.end))

    def report_batch_done(self, batch_size: int | None = None) -> bool:
        """Mark the samples of a batch as done, in the order in which the shards were fetched.

        Args:
            batch_size: Samples in this batch. Default: the client's `batch_size`.

        Returns:
            Whether these samples finished a shard; in that case the shard's report is in the master's journal.

        Raises:
            LeaseLostError: A shard no longer belonged to this reader. The other shards were reported.
            NoMasterError: No master answers. The shards are reported once a master is back.
        """
        self._check()
        finished: list[Shard] = []
        with self._lock:
            self._counted += self._batch_size if batch_size is None else batch_size
            while self._pending and self._counted >= len(self._pending[0]):
                shard = self._pending.popleft()
                self._counted -= len(shard)
                finished.append(shard)
            if not self._pending:
                self._counted = 0
            elif self._counted:
                self.consume(self._pending[0], self._counted)
        if finished:
            self.report_all(finished, "done")
        return bool(finished)

    def report_all_task_error(self, err_msg: str) -> None:
        """Report all fetched, unfinished shards as failed.

        Args:
            err_msg: Human-readable reason.

        Raises:
            LeaseLostError: See `report_batch_done`.
        """
        self.report_all(self._drop_pending(), "failed", err_msg or "no reason given")

    def get_current_epoch(self) -> int:
        """Return the epoch (counted from 0) of the shard that was fetched last."""
        return self._epoch

    def get_shard_checkpoint(self) -> str:
        """Return the progress of the data set, as JSON for `restore_shard_from_checkpoint`."""
        progress = base64.b64encode(self._client.progress(self.dataset)).decode()
        return json.dumps({"dataset_name": self.dataset, "progress": progress})

    def restore_shard_from_checkpoint(self, shard_checkpoint: str) -> None:
        """Reset the data set to earlier progress, for all workers; shards that workers have now are handed out again.

        Args:
            shard_checkpoint: The result of `get_shard_checkpoint`.

        Raises:
            SettingsError: The checkpoint belongs to a different data set, or is not a checkpoint.
            ProtocolError: The checkpoint's progress is corrupt.
        """
        try:
            found = json.loads(shard_checkpoint)
            name, progress = found["dataset_name"], base64.b64decode(found["progress"], validate=True)
        except (ValueError, TypeError, KeyError) as exc:
            raise SettingsError(
                "this is not a checkpoint of shards: pass the result of get_shard_checkpoint()"
            ) from exc
        if name != self.dataset:
            raise SettingsError(f"this is a checkpoint of {name!r}, not of {self.dataset!r}")
        self._client.restore_progress(self.dataset, progress)
        self._drop_pending()

    def _drop_pending(self) -> list[Shard]:
        with self._lock:
            pending = list(self._pending)
            self._pending.clear()
            self._indices.clear()
            self._counted = 0
        return pending
