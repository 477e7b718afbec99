"""Rows in a cache's folder that tell whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edl.distill.cache import CacheKey, SoftLabelCache

Array = np.ndarray[Any, Any]
KEY = CacheKey("resnet", "1", ("logits",), dataset="digits")
OTHER = CacheKey("resnet", "2", ("logits",), dataset="digits")


def rows(ids: Any, width: int = 100) -> dict[str, Array]:
    """Labels that tell whose they are."""
    return {"logits": np.repeat(np.asarray(ids, np.float32)[:, None], width, axis=1)}


def put(path: Path, ids: Any, key: CacheKey = KEY, width: int = 100, **arguments: Any) -> None:
    """Write rows."""
    with SoftLabelCache(0, path, **arguments) as cache:
        cache.view(key).put(ids, rows(ids, width))
        cache.flush()


def found(path: Path, ids: Any, key: CacheKey = KEY, width: int = 100) -> list[bool]:
    """Which ids a newly opened cache finds, after checking that their labels are theirs."""
    with SoftLabelCache(0, path) as cache:
        got = cache.view(key).get(ids)
        there = np.asarray(ids)[got.mask]
        if len(there):
            np.testing.assert_array_equal(got.outputs["logits"], rows(there, width)["logits"])  # type: ignore[arg-type]
        return list(map(bool, got.mask))
