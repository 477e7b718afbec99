"""The data sets of `edl.datasets` that are cut into shards, under the name that they had before."""

from __future__ import annotations

from edl.datasets import (
    Dataset,
    Follower,
    FollowSettings,
    LeasedUnits,
    ShardSettings,
    Source,
    UnitId,
    load_dataset,
    open_dataset,
    same_data,
)

__all__ = [
    "Dataset",
    "FollowSettings",
    "Follower",
    "LeasedUnits",
    "ShardSettings",
    "Source",
    "UnitId",
    "load_dataset",
    "open_dataset",
    "same_data",
]
