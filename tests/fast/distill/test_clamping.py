"""Labels that float16 does not hold are clamped, and the user is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.compress import top_k
from edl.distill.engine.compatibility import TeacherCompatibility
from edl.distill.transport.schema import ModelSpec, OutputSpec, TensorMetadata

LARGE = np.array([[1e6, 2.0, -1e9]], np.float32)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "clamped" in record.getMessage()]


def answered(datatype: str, *answers: Any) -> None:
    known = TeacherCompatibility("speech", OutputSpec(("y",), dtype="float16"))
    known.spec = ModelSpec("m", "1", {}, {"y": TensorMetadata("y", datatype, (3,))})
    for answer in answers:
        assert known.check_output("t", [("x", "FP32", (1, 3))], {"y": answer}) is None


def test_clamped_answers_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clamped = np.array([[65504, 2, -65504]], np.float16)
    answered("FP32", clamped, clamped)
    (warning,) = warnings_of(caplog)
    assert "'y'" in warning
    assert "speech" in warning
    assert "65504" in warning
    assert "dtype='float32'" in warning


@pytest.mark.parametrize("value", [65472, -65472, np.inf, -np.inf, 0])
def test_values_that_fit_are_not_warned_of(value: float, caplog: pytest.LogCaptureFixture) -> None:
    answered("FP32", np.array([[value, 2, 3]], np.float16))
    answered("FP16", np.array([[65504, 2, 3]], np.float16))  # the model's own
    assert not warnings_of(caplog)


@pytest.mark.parametrize("compressed", [False, True])
def test_clamped_labels_in_a_cache(compressed: bool, caplog: pytest.LogCaptureFixture) -> None:
    with SoftLabelCache(store_dtype="float16") as cache:
        view = cache.view(CacheKey("m", "1", ("y",), top_k=2 if compressed else None))
        labels = {"y": top_k(LARGE, 2) if compressed else LARGE}
        view.put([1], labels)
        view.put([2], labels)
    (warning,) = warnings_of(caplog)
    assert ("1e+06" if compressed else "-1e+09") in warning
    assert "store_dtype" in warning
