"""Reads logs of the steps that a job's ranks finished, to find which ranks still work and which steps were lost."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["FinishedStep", "StepLogs", "longest_gap_s", "median_step_s"]


@dataclass(frozen=True)
class FinishedStep:
    """A step that a process in a world of `world` ranks finished at `at` (`time.monotonic()`)."""

    at: float
    step: int
    generation: int
    world: int
    pid: int

    @property
    def life(self) -> tuple[int, int]:
        """Return a value that changes with each new world.

        It needs both parts: torchrun counts no restart when a node joins, and other launchers keep their processes.
        """
        return self.generation, self.pid


class StepLogs:
    """All step logs in a folder, read as they grow. A place is named by a node's name, '-' and a local rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.steps: dict[str, list[FinishedStep]] = {}
        self.saved: dict[str, list[int]] = {}

    def read(self) -> None:
        """Read what was written since the last call. A line that is not complete yet is left for the next call."""
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
        """Return the steps finished after `begin`, by place, for places that finished any."""
        recent = {place: [step for step in steps if step.at >= begin] for place, steps in self.steps.items()}
        return {place: steps for place, steps in recent.items() if steps}

    def last(self, place: str) -> FinishedStep | None:
        """Return the last step that a place has finished."""
        steps = self.steps.get(place)
        return steps[-1] if steps else None

    def together(self, places: Collection[str], since: float, count: int) -> bool:
        """Return whether exactly `places` form one world, in which each has finished `count` steps after `since`."""
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
        """Return the first step that `place` finished in its current world."""
        return self._lives(place)[1][0]

    def lost(self, places: Iterable[str]) -> int:
        """Return how many steps from before the current world were repeated in it."""
        lives = [self._lives(place) for place in places]
        reached = max((before[-1].step for before, _ in lives if before), default=-1)
        return max(0, reached - min(now[0].step for _, now in lives) + 1)

    def _lives(self, place: str) -> tuple[list[FinishedStep], list[FinishedStep]]:
        """Return the steps before the current world, and the steps in it."""
        steps = self.steps[place]
        begin = next((number for number, step in enumerate(steps[::-1]) if step.life != steps[-1].life), len(steps))
        return steps[: len(steps) - begin], steps[len(steps) - begin :]

    def save_interval(self) -> int:
        """Return the most steps between two snapshots of a place."""
        gaps = [after - before for saved in self.saved.values() for before, after in pairwise(saved)]
        return max(gaps, default=0)


def longest_gap_s(steps: Sequence[FinishedStep], begin: float, end: float) -> float:
    """Return the longest time between two finished steps of a place that overlaps the time from `begin` to `end`."""
    pairs = pairwise(steps)
    return max((after.at - before.at for before, after in pairs if after.at >= begin and before.at <= end), default=0.0)


def median_step_s(steps: Sequence[FinishedStep]) -> float:
    """Return the median time of consecutive steps in one generation."""
    pairs = pairwise(steps)
    return statistics.median(b.at - a.at for a, b in pairs if a.life == b.life and b.step == a.step + 1)
