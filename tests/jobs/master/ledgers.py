"""What workers wrote of their shards, and how often each sample was counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Did(NamedTuple):
    """A shard that a worker did, and what it knows of its report: None if it was killed before it heard."""

    lease: int
    epoch: int
    start: int
    stop: int
    accepted: bool | None


def read_ledgers(folder: Path) -> list[Did]:
    return [entry for path in sorted(folder.glob("ledger.*")) for entry in _read(path)]


def _read(path: Path) -> Iterator[Did]:
    lines = [line.split() for line in path.read_text().splitlines()]
    answers = {int(parts[1]): parts[0] == "accepted" for parts in lines if parts[0] in ("accepted", "refused")}
    for parts in lines:
        if parts[0] == "did":
            lease, _, epoch, start, stop = map(int, parts[1:])
            yield Did(lease, epoch, start, stop, answers.get(lease))


def counted(entries: list[Did]) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was counted, by leases that were accepted.

    A lease's number is never given twice, and a shard is given again only where no lease of it was accepted: of a
    shard's leases in the ledgers the last is the one that counted, where its worker was killed before it heard.
    """
    last: dict[tuple[int, int], Did] = {}
    for entry in entries:
        key = (entry.epoch, entry.start)
        if key not in last or entry.lease > last[key].lease:
            last[key] = entry
    counts: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        is_last = last[entry.epoch, entry.start] is entry
        assert not (entry.accepted and not is_last), f"{entry} was accepted, and its shard was given again"
        assert not (entry.accepted is False and is_last), f"{entry} was refused, and its shard was not given again"
        if entry.accepted or (entry.accepted is None and is_last):
            counts.update((entry.epoch, sample) for sample in range(entry.start, entry.stop))
    return counts
