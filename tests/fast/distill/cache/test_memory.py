"""Rows as records, and which of them stay in a bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.distill.cache.folder import Namespace
from edl.distill.cache.records import UNKNOWN, CacheKey, RowLayout, flatten
from edl.distill.cache.store import IDLE_AFTER_CALLS, ROW_OVERHEAD, MemoryTier
from edl.errors import SettingsError

KEY = CacheKey("resnet", "1", ("logits",))
RECORD = b"x" * (1024 - ROW_OVERHEAD)  # a row of one KiB, bookkeeping included


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_survive_records(rows: int) -> None:
    rng = np.random.default_rng(1)
    outputs = {
        "logits": rng.normal(size=(rows, 9)).astype(np.float32),
        "half": rng.normal(size=(rows, 3)).astype(np.float16),
        "flag": rng.random(rows) > 0.5,
        "boxes": rng.integers(0, 255, (rows, 2, 4)).astype(np.uint8),
        "big-endian": rng.normal(size=(rows, 2)).astype(">f8"),
    }
    arrays, layout = flatten(outputs, rows)
    records = layout.pack(arrays, [(1, UNKNOWN)] * rows)
    assert RowLayout.from_json(layout.to_json()) == layout
    again = layout.restore(layout.unpack(records))
    assert again.keys() == outputs.keys()
    for name, array in outputs.items():
        assert again[name].dtype == array.dtype.newbyteorder("<")  # type: ignore[union-attr]
        np.testing.assert_array_equal(again[name], array)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"names": np.array([b"a", b"b"], object)}, "'names' is object"),
        ({"z": np.zeros((3, 3))}, r"shape \[3, 3\]: expected 2 rows"),
        ({"z": np.float32(1)}, r"shape \[\]"),
        ({"z": np.zeros((2, 0))}, "which have no elements"),
        ({}, "no outputs"),
    ],
)
def test_what_cannot_be_kept_is_named(outputs: dict[str, np.ndarray], words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SettingsError, match=words):
        flatten(outputs, 2)


def test_larger_epoch_leaves_most_rows() -> None:
    """Least recently used alone would find none: each row would be gone just before its turn."""
    tier = MemoryTier(50 * 1024)
    rows = Namespace(KEY)
    for epoch in range(5):
        hits = 0
        for sample in range(100):
            if not tier.read(rows, [sample]):
                tier.put(rows, {sample: RECORD})
            else:
                hits += 1
        assert epoch == 0 or hits >= 40


def test_unused_namespace_makes_room_at_once() -> None:
    tier = MemoryTier(10 * 1024)
    old, new = Namespace(KEY), Namespace(KEY)
    tier.put(old, dict.fromkeys(range(10), RECORD))
    tier.put(new, {0: RECORD})
    assert not tier.ids(new)  # the other one was used just now
    for _ in range(IDLE_AFTER_CALLS + 1):
        tier.read(new, [0])
    tier.put(new, dict.fromkeys(range(10), RECORD))
    assert tier.ids(new) == list(range(10))
    assert not tier.ids(old)


def test_only_equal_keys_are_alike() -> None:
    key = CacheKey("resnet/50", "1", ("logits",), dataset="cifar")
    assert key == CacheKey("resnet/50", "1", ("logits",), dataset="cifar", temperature=4.0)
    changes: list[dict[str, Any]] = [
        {"version": "2"},
        {"model": "resnet/51"},
        {"outputs": ("logits", "features")},
        {"dataset": "cifar, flipped"},
        {"dtype": "float16"},
        {"service": "a"},
        {"service": "b"},
        {"inputs": ("x",)},
        {"top_k": 5},
        {"top_k": 5, "temperature": 4.0},
    ]
    others = [replace(key, **change) for change in changes]
    assert len({each.to_json() for each in [key, *others]}) == 1 + len(others)
    for each in others:
        assert CacheKey.from_json(each.to_json()) == each


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"model": "m"}',
        '{"model": "m", "version": "1", "outputs": ["y"], "temperature": NaN, "top_k": 1}',
        '{"model": "m", "version": "1", "outputs": ["y"], "top_k": true}',
        '{"model": "m", "version": "1", "outputs": ["y"], "more": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CacheKey.from_json(text)
