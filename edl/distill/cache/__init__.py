"""Keeps soft labels, so that teachers are asked only once for inputs which do not change.

`SoftLabelCache` keeps rows by sample id, apart for everything else that an answer depends on (`CacheKey`), in memory
and in a folder that several processes may share. `load_labels` reads such a folder whole. Inside:

- `key` and `layout`: what an answer depends on, and how a row of several outputs becomes a run of bytes;
- `sequences`: ids of sequences, whose records have rows of their own number;
- `memory`: the rows in memory, and which of them stay;
- `segment`: a file of rows; `folder`: many, under a common bound; `namespace`: rows found in them; `writer`: made;
- `store` and `view`: the front; `labels`: everything of a folder as arrays.

What does not belong here: deciding when to ask teachers.
"""

from __future__ import annotations

from edl.distill.cache.key import CacheKey
from edl.distill.cache.labels import LabelSet, load_labels
from edl.distill.cache.sequences import SequenceIds, fingerprints_of
from edl.distill.cache.store import CacheStats, SoftLabelCache
from edl.distill.cache.view import CacheView, Found

__all__ = [
    "CacheKey",
    "CacheStats",
    "CacheView",
    "Found",
    "LabelSet",
    "SequenceIds",
    "SoftLabelCache",
    "fingerprints_of",
    "load_labels",
]
