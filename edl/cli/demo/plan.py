"""How much of everything the demo does, and what happens when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DemoPlan"]


@dataclass(frozen=True)
class DemoPlan:
    """All that can be chosen.

    Attributes:
        out: folder for the picture, the figures and the teachers' logs.
        seeds: students of either kind; every seed has its own images, distortions and initial weights.
        steps: optimizer steps of a student.
        rows: images in a step, and in a request to a teacher.
        labelled: images that a seed's students learn from.
        teachers: processes at the start.
        pause_ms: how much longer a teacher takes for a batch than the little network needs, as a large model would.
        teacher_epochs: how long the teacher is trained.
        kill_at, join_at, drain_at: fractions of the epoch at which a teacher is killed, started, drained.
        temperature: of the softened distributions that the distilled students learn.
        dashboard: show everything on a page as well.
    """

    out: Path
    seeds: int = 5
    steps: int = 800
    rows: int = 32
    labelled: int = 100
    teachers: int = 3
    pause_ms: float = 40.0
    teacher_epochs: int = 25
    kill_at: float = 0.25
    join_at: float = 0.40
    drain_at: float = 0.72
    temperature: float = 4.0
    dashboard: bool = False

    @property
    def batches(self) -> int:
        """Batches of the epoch: the seeds take turns."""
        return self.seeds * self.steps

    @property
    def total_rows(self) -> int:
        """Samples of the epoch."""
        return self.batches * self.rows

    def seed_of(self, batch: int) -> int:
        """Whose batch it is."""
        return batch % self.seeds
