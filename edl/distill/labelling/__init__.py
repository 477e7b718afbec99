"""Labels a data set ahead of time, into the folder of a `SoftLabelCache`.

- `plan`: what to ask for, and how far it is;
- `data_set`: `label`, all of a data set by one process;
- `shard_labeller`: `ShardLabeller`, ranges of rows that a `ShardSource` hands out to several processes;
- `shard_tracker`: which of these ranges are read and answered; `bad_rows`: the rows of a range that no teacher takes;
- `fingerprint`: tells whether two processes have the same data.

What does not belong here: who hands out the ranges. `edl.master` does in `edl label --job`, which joins the two.
"""

from __future__ import annotations

from edl.distill.labelling.data_set import label
from edl.distill.labelling.fingerprint import DataFingerprint
from edl.distill.labelling.plan import LabelPlan, LabelProgress, LabelReport
from edl.distill.labelling.shard_labeller import RowShard, ShardLabeller, ShardSource

__all__ = [
    "DataFingerprint",
    "LabelPlan",
    "LabelProgress",
    "LabelReport",
    "RowShard",
    "ShardLabeller",
    "ShardSource",
    "label",
]
