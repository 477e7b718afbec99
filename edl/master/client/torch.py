"""Samples of a job's shards as a data set for PyTorch's `DataLoader` and its workers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.utils.data

from edl.errors import SettingsError
from edl.master.client.master_client import DEFAULT_TIMEOUT_S, MasterClient
from edl.master.client.shard_reader import ShardReader
from edl.settings import Credentials

__all__ = ["ShardDataset"]


class ShardDataset(torch.utils.data.IterableDataset[Any]):
    """Samples of the shards that the master gives this process. Every worker of a `DataLoader` is a reader.

    Nothing is opened until the first sample is requested. The process that requests it then opens the channel, so each
    worker has its own. A shard is reported as done when the sample after its last is requested. With workers, a shard
    is therefore done when the loader has its samples, not when the training loop has them: if a process is killed,
    training may lose `num_workers * prefetch_factor` batches. If each sample must count exactly once, iterate over a
    `ShardReader` in the training process. Data sets with commit="checkpoint" are refused here.

    If reading a sample raises an error, the sample's shard has failed. An error in code outside this data set, such as
    a `collate_fn` or the training loop, is not visible here: the shard is requeued, with no failure counted.

    Args:
        job: Name of the job.
        dataset: Name of the data set at the master.
        store: URL of the Store in which the job's masters elect a leader. Default: from the environment.
        endpoint: `host:port` of the master, instead of a Store.
        timeout_s: Seconds to wait for an unreachable master.
        credentials: Certificates and tokens. Default: from the environment.
        prefetch: Shards that each reader prefetches.
        samples: See `ShardReader`.
        holder: Prefix of the displayed name; the host, the process and the worker's number follow.
    """

    def __init__(
        self,
        job: str,
        dataset: str,
        store: str | None = None,
        *,
        endpoint: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: Credentials | None = None,
        prefetch: int = 2,
        samples: object = None,
        holder: str | None = None,
    ) -> None:
        self._open_client = partial(
            MasterClient, job, store, endpoint=endpoint, timeout_s=timeout_s, credentials=credentials
        )
        self._dataset = dataset
        self._options: dict[str, Any] = {"prefetch": prefetch, "samples": samples}
        self._holder = holder

    def __iter__(self) -> Iterator[Any]:
        """Yield samples until the master has no shard left.

        Raises:
            SettingsError: The data set has commit="checkpoint".
            PoisonedShardsError: At the end, if shards were given up.
            NoMasterError: The master was unreachable for `timeout_s`.
            Exception: Your code that makes the samples raised this error. The shard is reported as failed.
        """
        worker = torch.utils.data.get_worker_info()
        host = socket.gethostname()
        name = host if self._holder is None else f"{self._holder}:{host}"
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(self._open_client())
            options = dict(self._options, holder=f"{name}:{os.getpid()}")
            if worker is not None:
                loader = f"{name}:{os.getppid()}.{(worker.seed - worker.id) & 0xFFFF:04x}/"
                options["holder"] = f"{loader}{worker.id}"
                if worker.num_workers > 1:
                    options["may_leave"] = partial(_has_sibling_shards, client, self._dataset, loader)
            reader = stack.enter_context(ShardReader(client, self._dataset, **options))
            for sample in reader.samples():
                if reader.by_checkpoint:
                    raise SettingsError(
                        f'{self._dataset} has commit="checkpoint": its shards are done when a checkpoint contains the '
                        "reader's position, and a ShardDataset has none. Iterate over a ShardReader in the training "
                        'process, or create the data set with commit="report"'
                    )
                yield sample


def _has_sibling_shards(client: MasterClient, dataset: str, loader: str) -> bool:
    """Return whether other workers of the loader have shards.

    A loader takes batches from its workers in turn. If a worker waited for shards that its siblings have, the loader
    would never ask the siblings. So the worker ends, and the siblings continue without it.
    """
    datasets = client.status()["datasets"]
    holders = [holder for found in datasets if found["name"] == dataset for holder in found["holders"]]
    return any(holder["leases"] and holder["holder"].startswith(loader) for holder in holders)
