"""What items hold besides their inputs counts as memory that is held ahead of the training loop."""

from __future__ import annotations

import array
from collections import UserDict, deque
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter, SampleListCutter

MIB = 1 << 20
REST: dict[str, Any] = {
    "ndarray": np.ones(MIB, np.uint8),
    "bytes": bytes(MIB),
    "str": "a" * MIB,
    "bytearray": bytearray(MIB),
    "array.array": array.array("B", bytes(MIB)),
    "a dictionary": {"a": {"b": np.ones(MIB, np.uint8)}},
    "a list of bytes": [bytes(MIB // 2), bytes(MIB // 2 + 1)],
    "deque": deque([np.ones(MIB, np.uint8)]),
    "UserDict": UserDict(a=np.ones(MIB, np.uint8)),
    "object": SimpleNamespace(a=np.ones(MIB, np.uint8)),
    "object array": np.array([np.ones(MIB, np.uint8), None], object),
}
GETTERS = {"x": itemgetter(0)}


@pytest.mark.parametrize("kind", REST)
def test_what_is_passed_through_counts(kind: str) -> None:
    x = np.ones((3, 5), np.float32)
    (chunk,) = BatchCutter(GETTERS, None, 1).put((x, REST[kind]))[1]
    assert MIB <= chunk.weight - x.nbytes <= 1.01 * MIB, "the rest of a batch, once"
    cutter = SampleCutter(GETTERS, 4, 1)
    (chunk,) = [chunk for _ in range(4) for chunk in cutter.put((x, REST[kind]))[1]]
    assert 4 * MIB <= chunk.weight - 4 * x.nbytes <= 4.04 * MIB, "the rest of each sample"
    (chunk,) = SampleListCutter(GETTERS, 2, 1).put([(x, REST[kind])] * 2)[1]
    assert 2 * MIB <= chunk.weight - 2 * x.nbytes <= 2.02 * MIB, "the rest of each sample of a list"


@pytest.mark.parametrize("x", [np.ones((4, MIB), np.uint8), [[1.5] * 9] * 4, ["a" * MIB, "b" * MIB]])
@pytest.mark.parametrize("cutter", [BatchCutter, SampleCutter])
def test_inputs_count_once(x: Any, cutter: type[Cutter]) -> None:
    (chunk,) = cutter(GETTERS, 1 if cutter is SampleCutter else None, 1).put((x, 7))[1]
    assert chunk.weight == chunk.nbytes


def test_tensors_and_pictures_count() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for rest in (torch.ones(MIB, dtype=torch.uint8), image.new("RGB", (1024, 1024))):
        (chunk,) = BatchCutter(GETTERS, None, 1).put((np.ones((3, 5)), rest))[1]
        assert MIB <= chunk.rest_nbytes <= 3 * MIB
