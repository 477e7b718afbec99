"""Logs of the steps that a job's ranks finished: who still works, and what was lost. Reads files only."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["FinishedStep", "StepLogs", "longest_gap_s", "median_step_s"]


@dataclass(frozen=True)
class FinishedStep:
    """A finished step, at `at` (`time.monotonic()`), by a process of a world of `world` ranks."""

    at: float
    step: int
    generation: int
    world: int
    pid: int

    @property
    def life(self) -> tuple[int, int]:
        """Changes with each new world: torchrun counts no restart when a node joins, others keep their processes."""
        return self.generation, self.pid


class StepLogs:
    """All step logs in a folder, read as they grow. A place is a node's name, '-' and a local rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.steps: dict[str, list[FinishedStep]] = {}
        self.saved: dict[str, list[int]] = {}

    def read(self) -> None:
        """Take in what was written since the last time. A line that is not complete yet is left for the next."""
        for path in self._folder.glob("*.steps"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(text)
            steps, saved = self.steps.setdefault(path.stem, []), self.saved.setdefault(path.stem, [])
            for line in text.decode().splitlines():
                kind, *fields = line.split()
                if kind == "saved":
                    saved.append(int(fields[0]))
                else:
                    steps.append(FinishedStep(float(fields[0]), *(int(field) for field in fields[1:])))

    def since(self, begin: float) -> dict[str, list[FinishedStep]]:
        """The steps that were finished after `begin`, of those places that finished any."""
        recent = {place: [step for step in steps if step.at >= begin] for place, steps in self.steps.items()}
        return {place: steps for place, steps in recent.items() if steps}

    def last(self, place: str) -> FinishedStep | None:
        """The last step that a place has finished."""
        steps = self.steps.get(place)
        return steps[-1] if steps else None

    def together(self, places: Collection[str], since: float, count: int) -> bool:
        """Whether exactly `places` are one world, and each finished `count` steps in it after `since`."""
        newest = [self.last(place) for place in places]
        if None in newest or len({step.generation for step in newest if step}) != 1:
            return False
        for place in places:
            recent = self.steps[place][-count:]
            world = recent[-1].generation, len(places)
            if (
                len(recent) < count
                or recent[0].at < since
                or any((step.generation, step.world) != world for step in recent)
            ):
                return False
        return True

    def resumed(self, place: str) -> FinishedStep:
        """The first step that `place` finished in the world that it belongs to now."""
        return self._lives(place)[1][0]

    def lost(self, places: Iterable[str]) -> int:
        """How many steps that were finished before the present world were done again in it."""
        lives = [self._lives(place) for place in places]
        reached = max((before[-1].step for before, _ in lives if before), default=-1)
        return max(0, reached - min(now[0].step for _, now in lives) + 1)

    def _lives(self, place: str) -> tuple[list[FinishedStep], list[FinishedStep]]:
        """The steps before the present world, and those in it."""
        steps = self.steps[place]
        begin = next((number for number, step in enumerate(steps[::-1]) if step.life != steps[-1].life), len(steps))
        return steps[: len(steps) - begin], steps[len(steps) - begin :]

    def save_interval(self) -> int:
        """The most steps between two snapshots of a place."""
        gaps = [after - before for saved in self.saved.values() for before, after in pairwise(saved)]
        return max(gaps, default=0)


def longest_gap_s(steps: Sequence[FinishedStep], begin: float, end: float) -> float:
    """The longest time between two finished steps of one place that overlaps `begin` to `end`."""
    pairs = pairwise(steps)
    return max((after.at - before.at for before, after in pairs if after.at >= begin and before.at <= end), default=0.0)


def median_step_s(steps: Sequence[FinishedStep]) -> float:
    """Of consecutive steps of one generation."""
    pairs = pairwise(steps)
    return statistics.median(b.at - a.at for a, b in pairs if a.life == b.life and b.step == a.step + 1)
