"""Teachers' labels of sequences that a program makes as it goes: for loops in which the student generates.

`Scorer` labels sequences call by call, on the same engine as a reader's; `on_policy` is the loop of generating and
scoring, a step ahead. What does not belong here: generation, losses, and data sources, which are a reader's.
"""

from __future__ import annotations

from edl.distill.scoring.generation import on_policy
from edl.distill.scoring.scorer import Scorer

__all__ = ["Scorer", "on_policy"]
