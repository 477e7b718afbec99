"""Labels a data set ahead of time, into the folder of a `SoftLabelCache`.

- `fingerprint`: which data a folder has labels for, and whether the data change during a run (`DataGuard`);
- `labeller`: `Labeller` labels a whole data set in one process;
- `shards`: `ShardLabeller` labels ranges of rows that a `ShardSource` hands out to several processes.

Handing out ranges does not belong here: `edl label --job` connects `ShardLabeller` to a master.
"""

from __future__ import annotations

from edl.distill.labelling.fingerprint import DataFingerprint, DataGuard, note_files
from edl.distill.labelling.labeller import Labeller, LabelPlan, LabelProgress
from edl.distill.labelling.shards import RowShard, ShardLabeller, ShardSource

__all__ = [
    "DataFingerprint",
    "DataGuard",
    "LabelPlan",
    "LabelProgress",
    "Labeller",
    "RowShard",
    "ShardLabeller",
    "ShardSource",
    "note_files",
]
