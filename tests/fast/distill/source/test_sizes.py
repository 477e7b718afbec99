"""What arrays and answers weigh, and what is estimated of answers to come."""

from __future__ import annotations

import numpy as np
import pytest

from edl.distill.compress import top_k
from edl.distill.pipeline.answer_size import AnswerSizeEstimator, outputs_nbytes
from edl.distill.source.sizes import arrays_nbytes
from edl.distill.transport.schema import ModelSpec, OutputSpec, TensorMetadata


def spec_of(datatype: str, *shape: int) -> ModelSpec:
    return ModelSpec("m", "1", {}, {"y": TensorMetadata("y", datatype, shape)})


def test_strings_weigh_what_they_hold() -> None:
    clips = np.array([b"x" * 1000, b"y" * 3000], object)
    assert 4000 <= arrays_nbytes([clips]) < 4200
    assert arrays_nbytes([np.zeros((4, 8), np.float32)]) == 128


@pytest.mark.parametrize(
    ("datatype", "k"), [("FP16", None), ("FP32", None), ("INT64", None), ("FP16", 3), ("FP32", 3), ("FP32", 100)]
)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_estimate_of_the_spec_is_exact(datatype: str, k: int | None, dtype: str | None) -> None:
    numpy_dtype = {"FP16": "float16", "FP32": "float32", "INT64": "int64"}[datatype]
    answer = np.zeros((5, 2, 10), dtype if dtype and datatype.startswith("FP") else numpy_dtype)
    outputs = {"y": answer if k is None else top_k(answer, min(k, 10))}
    weight = AnswerSizeEstimator(OutputSpec(("y",), top_k=k, dtype=dtype))  # type: ignore[arg-type]
    assert weight.expected(5, spec_of(datatype, 2, 10)) == outputs_nbytes(outputs)


def test_unknown_until_the_first_answer() -> None:
    weight = AnswerSizeEstimator(OutputSpec(("y",)))
    for spec in (None, spec_of("FP32", -1), spec_of("BYTES", 1), ModelSpec("m", "1", {}, {})):
        assert weight.expected(3, spec) is None
    weight.came(2, 200)
    assert weight.expected(3, None) == 300
