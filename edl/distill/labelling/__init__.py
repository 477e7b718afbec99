"""Labels a data set ahead of time, and stores the labels in the folder of a `SoftLabelCache`.

`Labeller` labels a whole data set in one process; `ShardLabeller` labels ranges of rows that a `ShardSource` hands out
to several processes. A `DataGuard` detects labels that belong to other data.
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
