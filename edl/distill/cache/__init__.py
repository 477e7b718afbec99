"""Keeps soft labels, so that teachers are asked only once for inputs which do not change.

`SoftLabelCache` keeps rows by sample id, apart for everything else that an answer depends on (`CacheKey`), in memory
and in a folder that several processes may share. `load_labels` reads such a folder whole. Inside:

- `records`: the identity of labels, and how a row of several outputs becomes a run of bytes;
- `folder`: the records on disk, in a SQLite database;
- `store`: the front, and the records in memory; `labels`: `load_labels`.

What does not belong here: deciding when to ask teachers.
"""

from __future__ import annotations

from edl.distill.cache.labels import LabelSet, load_labels
from edl.distill.cache.records import CacheKey, Found, RowIds, SequenceIds, fingerprints_of
from edl.distill.cache.store import CacheStats, CacheView, SoftLabelCache

__all__ = [
    "CacheKey",
    "CacheStats",
    "CacheView",
    "Found",
    "LabelSet",
    "RowIds",
    "SequenceIds",
    "SoftLabelCache",
    "fingerprints_of",
    "load_labels",
]
