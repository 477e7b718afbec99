"""Data sets: what `edl master` cuts into shards, and what `edl label` labels.

- `dataset`: what all kinds that are cut into shards have in common, settings, the index, and samples by number;
- `text`, `parquet`, `files`: lines and CSV, tables, sets of files; how files are found and read, here or by fsspec;
- `opening`: from a name to a data set, and from the master's `spec` to the same data set; a user's own function;
- `growing`: the `Follower` of a source without an end;
- `rows`: batches to be labelled: arrays, sequences of tokens, and samples that a function returns.

A new kind of file that is cut into shards is a subclass of `Dataset`: `_create` indexes the files, `_load` takes over
the index on a reader's machine, and `_read_units` reads units, which may be any part of a shard. List it in `_KINDS` of
`opening`. `parquet` is the example to follow; `files` has what it needs to find files, to read them, and to say that
one has changed. A kind that may grow has `_look` and `_next_part` too. A new kind of file to be labelled is an `_open_`
function of `rows` that returns `ArrayData` or `RaggedData`, called by `open_data`.

Handing out shards, asking teachers and keeping labels do not belong here, nor does any network except fsspec's.
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
