"""Data sets: what `edl master` cuts into shards, and what `edl label` labels.

- `opening`: from a name to a data set; a user's own function;
- `dataset`, `index`: the base of what is cut into shards, settings, and what the master keeps of it;
- `text`, `tables`, `files`: lines and CSV, Parquet, sets of files; `growing`: sources without an end;
- `rows`, `array_files`: batches to be labelled, and the files that have them;
- `storage`: files on this machine or on whatever fsspec reaches.

A data set is opened where it is created (`open_dataset`): it is indexed once, and its `spec` goes to the master. A
reader makes it again from that (`load_dataset`), and opens the files itself, on its own machine. Handing out
shards does not belong here, nor does any network except fsspec's.
"""

from __future__ import annotations

from edl.datasets.dataset import Dataset, LeasedUnits, ShardSettings, UnitId
from edl.datasets.growing import Follower, FollowSettings, Source
from edl.datasets.opening import load_dataset, open_data, open_dataset, same_data
from edl.datasets.rows import LabelDataset

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
