"""Leases over all shards of a data set, as a master would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edl.datasets import Dataset


@dataclass(frozen=True)
class Lease:
    epoch: int
    shard: int
    start: int
    stop: int


def leases(dataset: Dataset, epoch: int = 0) -> list[Lease]:
    size, units = dataset.spec.shard_size, dataset.spec.units
    return [Lease(epoch, shard, shard * size, min(units, (shard + 1) * size)) for shard in range(-(-units // size))]


def read_all(dataset: Dataset, epoch: int = 0) -> list[Any]:
    return [sample for lease in leases(dataset, epoch) for sample in dataset.read(lease)]
