"""Feeds soft labels into a training loop.

`DistillReader` works with any framework; `edl.distill.torch.distill` wraps a PyTorch `DataLoader`. `scoring` labels
sequences that a student generates, and `labelling` fills a cache ahead of time.
"""

from __future__ import annotations

from edl.distill.compress import TopK
from edl.distill.options import Options, Policy
from edl.distill.reader import DistillReader
from edl.distill.scoring import Scorer, on_policy
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers
from edl.settings import Credentials

__all__ = [
    "Credentials",
    "DistillReader",
    "Options",
    "Policy",
    "ReaderStats",
    "Scorer",
    "Teachers",
    "TopK",
    "on_policy",
]
