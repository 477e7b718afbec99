"""Caches soft labels, so that teachers are asked only once for inputs that do not change.

`SoftLabelCache` stores rows by sample id, separately for each `CacheKey`, which holds everything else that an answer
depends on. It keeps them in memory, or in a folder that several processes may share. `load_labels` reads a whole
folder.
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
