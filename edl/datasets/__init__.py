"""Data sets that `edl master` cuts into shards, or that `edl label` labels.

A new kind of file that is cut into shards is a subclass of `Dataset`, listed in `_KINDS` of `opening`; `parquet` is the
example to follow. A new kind of file to label is an `_open_` function of `rows`, called by `open_data`.
"""

from __future__ import annotations

from edl.datasets.dataset import Dataset, LeasedUnits, ShardSettings, Source, UnitId
from edl.datasets.growing import Follower, FollowSettings
from edl.datasets.opening import load_dataset, open_dataset, same_data
from edl.datasets.rows import LabelDataset, open_data

__all__ = [
    "Dataset",
    "FollowSettings",
    "Follower",
    "LabelDataset",
    "LeasedUnits",
    "ShardSettings",
    "Source",
    "UnitId",
    "load_dataset",
    "open_data",
    "open_dataset",
    "same_data",
]
