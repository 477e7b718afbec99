"""A process that writes labels into a cache and reads them back: the current one (`now`) or the old one (`before`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._child import answer
from edl.distill.cache import CacheKey, SequenceIds
from edl.distill.compress import TopK

KINDS = {"logits": CacheKey("resnet", "1", ("logits",)), "tokens": CacheKey("lm", "1", ("logprobs",), top_k=64)}
IDS = {"logits": 16_384, "tokens": 512}
"""Rows of 1,000 float32, and sequences of 256 tokens with their 64 largest log-probabilities: 64 MB each."""
_CLASSES, _TOKENS, _K = 1000, 256, 64
_BATCH = {"logits": 64, "tokens": 8}

Batch = tuple[Any, Mapping[str, Any]]


def batch_of(kind: str, ids: np.ndarray[Any, Any]) -> Batch:
    """Return ids in the form that the cache takes, and labels that identify their sample."""
    if kind == "logits":
        return ids, {"logits": np.repeat(ids.astype(np.float32)[:, None], _CLASSES, axis=1)}
    lengths = np.full(len(ids), _TOKENS, np.int64)
    rows = np.repeat(ids, _TOKENS)
    values = np.repeat(rows.astype(np.float32)[:, None], _K, axis=1)
    labels = TopK(
        np.broadcast_to(np.arange(_K, dtype=np.int32), values.shape), values, values[:, 0].copy(), 1.0, 32_000
    )
    return SequenceIds(ids.tolist(), lengths, ids.astype(np.uint64), ("ids",)), {"logprobs": labels}


def value_of(found: Any) -> Any:
    """Return the values by which labels identify their samples."""
    (output,) = found.outputs.values()
    return output[:, 0] if isinstance(output, np.ndarray) else output.values[::_TOKENS, 0]


class Side:
    """Carries out the benchmark's requests.

    Args:
        make: Makes the cache.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._cache: Any = None

    def write(self, folder: str, kind: str, part: int, parts: int) -> float:
        """Write every `parts`-th batch, and return the labels per second."""
        batches = np.arange(IDS[kind]).reshape(-1, _BATCH[kind])[part::parts]
        labels = [batch_of(kind, ids) for ids in batches]
        begun = time.perf_counter()
        with self._make(0, folder) as cache:
            view = cache.view(KINDS[kind])
            for ids, outputs in labels:
                view.put(ids, outputs)
            cache.flush()
            return float(batches.size / (time.perf_counter() - begun))

    def read(self, folder: str, kind: str, part: int, parts: int) -> float:
        """Read all labels in a random order, from the open cache if there is one, and return the labels per second."""
        batches = np.random.default_rng(part).permutation(IDS[kind]).reshape(-1, _BATCH[kind])
        wanted = [(batch_of(kind, ids)[0], ids) for ids in batches]
        begun = time.perf_counter()
        if self._cache is None:
            self._cache = self._make(0, folder)
        view = self._cache.view(KINDS[kind])
        for ids, expected in wanted:
            found = view.get(ids)
            if not found.complete or value_of(found).tolist() != expected.tolist():
                raise RuntimeError("a label is missing, or belongs to another sample")
        return float(batches.size / (time.perf_counter() - begun))

    def close(self) -> float:
        """Close the open cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        return 0.0


def forget(folder: str) -> None:
    """Have the kernel drop a folder's files from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    if sys.argv[1] == "now":
        from edl.distill.cache import SoftLabelCache as Cache
    else:
        from benchmarks.cache_before.store import SoftLabelCache as Cache  # type: ignore[assignment]
    side = Side(Cache)
    answer(lambda request: {"per_s": getattr(side, request.pop("do"))(**request)})
