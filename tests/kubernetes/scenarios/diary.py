"""What the processes of a job wrote down, and what may be concluded from it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Diary:
    """A file to which all processes of a job append lines of JSON: kind, at (seconds), pod, pid, and more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, kind: str = "", after: float = 0.0) -> list[Entry]:
        """Entries of a kind, or all, that were written after a time; in the order in which they were written."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        # A line that crosses a page of the file may be there by half while it is written.
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in found if kind in ("", entry["kind"]) and entry["at"] > after]

    def has(self, kind: str, accept: Callable[[Entry], bool] = lambda entry: True, after: float = 0.0) -> bool:
        """Whether there is an entry of a kind that is accepted."""
        return any(accept(entry) for entry in self.entries(kind, after))

    def longest_pause(self, kind: str) -> float:
        """The longest time in seconds between two entries of a kind."""
        times = [entry["at"] for entry in self.entries(kind)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True)
class Life:
    """The time in which a process was seen alive."""

    pod: str
    pid: int
    begin: float
    end: float


def lives(diary: Diary) -> list[Life]:
    """The processes of a diary."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for entry in diary.entries():
        times[entry["pod"], entry["pid"]].append(entry["at"])
    return [Life(pod, pid, min(seen), max(seen)) for (pod, pid), seen in times.items()]


def index_of(pod: str) -> str:
    """NAME-ROLE-INDEX of NAME-ROLE-INDEX-TRY."""
    return pod.rpartition("-")[0]


def overlaps(found: list[Life]) -> list[tuple[Life, Life]]:
    """Pairs of processes of one member that were alive at the same time."""
    return [
        (first, second)
        for first in found
        for second in found
        if first is not second
        and index_of(first.pod) == index_of(second.pod)
        and (first.begin, first.pod, first.pid) < (second.begin, second.pod, second.pid)
        and second.begin < first.end
    ]
