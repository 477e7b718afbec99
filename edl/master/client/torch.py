"""Samples of a job's shards as a data set for PyTorch's `DataLoader`, with its workers."""

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
    """Samples of the shards that the master gives to this process. Every worker of a `DataLoader` is a reader.

    Nothing is opened before the first sample is asked for, in the process that asks: a worker makes a channel of its
    own, whether it was forked or spawned. A shard is reported done when the sample after its last is asked for. With
    workers that is when the loader has its samples, not when the training loop has them: `num_workers *
    prefetch_factor` batches may be lost to the training with a process that is killed. Where each sample must be
    counted once, iterate over a `ShardReader` in the training process; here data sets of commit="checkpoint" are
    refused.

    Args:
        job: its name.
        dataset: the data set's name at the master.
        store: URL of the Store in which the job's masters compete; None for what the environment names.
        endpoint: `host:port` of the master, in place of a Store.
        timeout_s: how long to wait for a master that is away, in seconds.
        credentials: certificates and tokens; None for what the environment names.
        prefetch: shards that each reader keeps at hand.
        samples: as for `ShardReader`.
        holder: the name that people see, before that of the host and the process, and the worker's number.
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
        self._job = job
        self._dataset = dataset
        self._store = store
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._prefetch = prefetch
        self._samples = samples
        self._holder = holder

    def __iter__(self) -> Iterator[Any]:
        """Yield samples until the master has no shard any more.

        Raises:
            SettingsError: the data set is of commit="checkpoint".
            PoisonedShardsError: at the end, where shards were given up.
            NoMasterError: the master was away for `timeout_s`.
        """
        worker = torch.utils.data.get_worker_info()
        host = socket.gethostname()
        name = host if self._holder is None else f"{self._holder}:{host}"
        options: dict[str, Any] = {"timeout_s": self._timeout_s, "credentials": self._credentials}
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(MasterClient(self._job, self._store, endpoint=self._endpoint, **options))
            chosen: dict[str, Any] = {"prefetch": self._prefetch, "samples": self._samples}
            if worker is None:
                chosen["holder"] = f"{name}:{os.getpid()}"
            else:
                loader = f"{name}:{os.getppid()}.{(worker.seed - worker.id) & 0xFFFF:04x}/"
                chosen["holder"] = f"{loader}{worker.id}"
                if worker.num_workers > 1:
                    chosen["may_leave"] = partial(_has_sibling_shards, client, self._dataset, loader)
            reader = stack.enter_context(ShardReader(client, self._dataset, **chosen))
            for sample in reader.samples():
                if reader.by_checkpoint:
                    raise SettingsError(
                        f'{self._dataset} has commit="checkpoint": its shards are done with the position that a '
                        "checkpoint holds, and a ShardDataset has none. Iterate over a ShardReader in the training "
                        'process, or create the data set with commit="report"'
                    )
                yield sample


def _has_sibling_shards(client: MasterClient, dataset: str, loader: str) -> bool:
    """Whether other workers of the loader have shards.

    A loader takes batches from its workers in turn. A worker that waited for shards which its siblings have would keep
    the loader from asking these, for ever: it ends, and they go on without it.
    """
    datasets = client.status()["datasets"]
    holders = [holder for found in datasets if found["name"] == dataset for holder in found["holders"]]
    return any(holder["leases"] and holder["holder"].startswith(loader) for holder in holders)
