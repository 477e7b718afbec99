"""Sources without an end: a text that grows, a folder that gets files, a source of the user's own.

A `Follower`, run by the program that created the data set, tells the master of what has come.
"""

from __future__ import annotations

from edl.master.datasets.growth.decision import FollowSettings
from edl.master.datasets.growth.follower import Follower
from edl.master.datasets.growth.growing_files import GrowingFileSet
from edl.master.datasets.growth.growing_text import GrowingText
from edl.master.datasets.growth.source import Source, SourceDataset
from edl.master.datasets.growth.watching import GrowingDataset

__all__ = [
    "FollowSettings",
    "Follower",
    "GrowingDataset",
    "GrowingFileSet",
    "GrowingText",
    "Source",
    "SourceDataset",
]
