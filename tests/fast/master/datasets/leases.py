"""Leases over all shards of a data set, as a master would give them; and a file system that counts what is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from edl.master.datasets import Dataset


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


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory that counts how often each byte of a file is read."""

    protocol = "counting"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    counts: Counter[tuple[str, int]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("counting:/"))
        return stripped

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        self.counts.update((self._strip_protocol(path), (start or 0) + at) for at in range(len(data)))
        return data


def register_counting() -> Iterator[type[CountingFileSystem]]:
    import fsspec

    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    CountingFileSystem.store.clear()
    CountingFileSystem.counts.clear()
    yield CountingFileSystem
    CountingFileSystem.store.clear()
