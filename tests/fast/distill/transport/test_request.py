"""Inputs in the types that a model wants: converted where nothing is lost, refused by name and value where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.distill.transport.conversion import select_inputs
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import ModelSpec, TensorMetadata
from edl.errors import SourceError
from edl.protocol.tensors import dtype_of


def converted(values: Any, dtype: str, datatype: str) -> Any:
    array = np.asarray(values, dtype)
    spec = ModelSpec("m", "1", {"x": TensorMetadata("x", datatype, array.shape[1:])}, {})
    return select_inputs(spec, {"x": array})["x"]


@pytest.mark.parametrize(
    ("values", "dtype", "datatype", "named"),
    [
        ([1, 2**32 + 1], "int64", "INT32", "4294967297 as int64"),
        ([300, 5], "int16", "INT8", "300"),
        ([1, 2**63], "uint64", "INT64", "9223372036854775808 as uint64"),
        ([0, -1], "int64", "UINT8", "-1 as int64"),
        ([-1], "int64", "UINT64", "-1 as int64"),
        ([1.0, np.nan, 1e300], "float64", "FP32", r"1e\+300 as float64"),
        ([70000.0], "float32", "FP16", "70000.0"),
        ([2**24, 2**24 + 1], "int64", "FP32", "16777217"),
        ([256, 257], "int64", "BF16", "257 as int64"),
        ([2**64 - 1], "uint64", "BF16", "18446744073709551615"),
        ([3.4e38], "float32", "BF16", r"3\.4e\+38 as float32"),
        ([2**64 - 1], "uint64", "FP32", "18446744073709551615"),
    ],
)
def test_value_lost_in_conversion_is_named(values: Any, dtype: str, datatype: str, named: str) -> None:
    with pytest.raises(SourceError, match=rf"input 'x' holds {named}.*wants {datatype}.*convert it in your source"):
        converted(values, dtype, datatype)


@pytest.mark.parametrize(
    ("values", "dtype", "datatype"),
    [
        ([-(2**31), 2**31 - 1], "int64", "INT32"),
        ([0, 2**63 - 1], "uint64", "INT64"),
        ([0, 2**63 - 1], "int64", "UINT64"),
        ([], "int64", "UINT8"),
        ([0.1, np.inf, -np.inf, np.nan], "float64", "FP32"),
        ([2**24 + 2, -(2**62), -(2**63)], "int64", "FP32"),
        ([2**63, 0], "uint64", "FP64"),
        ([1, 0], "bool", "INT8"),
        ([7, 8], ">i4", "INT32"),
        (np.zeros((2, 0)), "float64", "FP32"),
    ],
)
def test_equal_values_are_converted(values: Any, dtype: str, datatype: str) -> None:
    result = converted(values, dtype, datatype)
    assert result.dtype == dtype_of(datatype)
    np.testing.assert_array_equal(result, np.asarray(values, dtype).astype(result.dtype))


def test_values_bfloat16_lacks_are_refused() -> None:
    with pytest.raises(SourceError, match="input 'x' is bool; model 'm' wants BF16"):
        converted([True], "bool", "BF16")


def test_string_that_is_no_text_is_named() -> None:
    for array in (np.array(["good", "\ud800bad"]), np.array(["good", "\ud800bad"], object)):
        with pytest.raises(SourceError, match=r"input 'words' has a string that is no text, '\\ud800bad'.*send bytes"):
            Payload.of({"words": array}, None)
