"""Data sets that `edl master` cuts into shards or that `edl label` labels.

To support a new kind of file that is cut into shards, write a subclass of `Dataset` and list it in `_KINDS` in
`opening`; `parquet` is the example to follow. To support a new kind of file to label, write an `_open_` function in
`rows` and call it in `open_data`.
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
