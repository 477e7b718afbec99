"""What is cut into shards, and how a shard is read: ranges, text, tables, sets of files, sources that grow.

A data set is opened where it is created (`open_dataset`): it is indexed once, and its `spec` goes to the master. A
reader makes it again from that (`load_dataset`), and opens the files itself, on its own machine.
What does not belong here: who reads which shard when (`edl.master.shards`), and any network.
"""

from __future__ import annotations

from edl.master.datasets.dataset import Dataset, LeasedUnits, UnitId
from edl.master.datasets.growth import Follower, FollowSettings, Source
from edl.master.datasets.opening import load_dataset, open_dataset, same_data
from edl.master.datasets.settings import ShardSettings

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
