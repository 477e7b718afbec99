"""Whatever array a source yields reaches the teacher bit for bit, or is refused with the input's name and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.distill.source.cutters import BatchCutter
from edl.distill.transport.request import Payload, request_header, select_inputs
from edl.distill.transport.schema import ModelSpec, OutputSpec, TensorMetadata
from edl.distill.transport.shm import Arena
from edl.errors import SourceError
from edl.protocol import codec
from edl.protocol.tensors import dtype_of
from edl_serving import TensorSpec
from edl_serving.request import bind_tensors
from edl_serving.request_plan import plan_request
from tests.fast.serving.fakes import FakeBackend, model_of

X = {"x": itemgetter(0)}

SENDABLE = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
)

REFUSED = hnp.complex_number_dtypes() | hnp.datetime64_dtypes() | hnp.timedelta64_dtypes() | hnp.array_dtypes()
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena(64 << 20)
    yield made
    made.close()


def taught(fields: dict[str, Any], arena: Arena | None = None) -> Any:
    """What the teacher server reads of a request for these fields, by the student's code and the server's."""
    payload = Payload.of(fields, arena)
    ((name, datatype, shape),) = payload.inputs
    model = model_of(FakeBackend(inputs=(TensorSpec(name, datatype, shape[1:]),)))
    header = request_header(OutputSpec(("logits",)), ModelSpec("m", "", {}, {}), payload, region=None, timeout_s=1.0)
    header, raw = codec.REQUEST.split(codec.REQUEST.join(header, payload.raw))
    (array,) = bind_tensors(plan_request(codec.REQUEST.parse(header), model, 1000), raw, None).arrays
    found = array.copy()
    if arena is not None and payload.slot is not None:
        arena.give(payload.slot)
    return found


def bits(array: Any) -> tuple[Any, ...]:
    """Shape, kind, size and little-endian bytes: NaN's payload counts, the order of bytes and axes does not."""
    return array.shape, array.dtype.kind, array.dtype.itemsize, array.astype(array.dtype.newbyteorder("<")).tobytes()


def laid_out(array: Any, layout: str) -> Any:
    """The same elements, otherwise in memory."""
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "gaps":
        wide = np.zeros((*array.shape[:-1], 3 * array.shape[-1]), array.dtype)
        wide[..., ::3] = array
        return wide[..., ::3]
    if layout == "backwards":
        return array[::-1].copy()[::-1]
    if layout == "unaligned":
        raw = np.zeros(array.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
        return raw[1:].view(array.dtype).reshape(array.shape)
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


LAYOUTS = st.sampled_from(["plain", "fortran", "gaps", "backwards", "unaligned", "read-only"])


@settings(max_examples=50)
@given(hnp.arrays(SENDABLE, SHAPES), LAYOUTS)
def test_batches_arrive_bit_for_bit(arena: Arena, array: Any, layout: str) -> None:
    value = laid_out(array, layout)
    item, (chunk,) = BatchCutter(X, None, 1).put((value,))
    assert bits(taught(chunk.fields)) == bits(array)
    assert bits(taught(chunk.fields, arena)) == bits(array), "by way of shared memory"
    for fingerprint in item.fingerprints:
        fingerprint.check()


@settings(max_examples=30)
@given(hnp.arrays(REFUSED, SHAPES))
def test_other_types_are_refused(array: Any) -> None:
    with pytest.raises(SourceError, match=r"(?s)batch 0, input 'x': dtype .* cannot be sent: make it numbers"):
        BatchCutter(X, None, 1).put((array,))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2, np.longdouble), "of up to 64 bits"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "filled"),
        ([1, 2**64], "Python objects"),
        ([2**53 + 1, 0.5], "9007199254740993 would become"),
        ([-1, 2**63 - 1, 2**63], "9223372036854775807 would become"),
    ],
)
def test_what_is_no_batch_is_named(value: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        BatchCutter(X, None, 1).put((value,))


def test_bfloat16_arrives_as_its_numbers() -> None:
    numbers = np.array([1.0, -0.0, 3.140625, np.inf, 2.0**-130], np.float32)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    _, (chunk,) = BatchCutter(X, None, 1).put((numbers.astype(ml_dtypes.bfloat16),))
    assert bits(taught(chunk.fields)) == bits(numbers)
    torch = pytest.importorskip("torch")
    _, (chunk,) = BatchCutter(X, None, 1).put((torch.from_numpy(numbers).bfloat16(),))
    assert bits(taught(chunk.fields)) == bits(numbers)


def test_tensors_numpy_lacks_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")):
        with pytest.raises(SourceError, match="batch 0, input 'x'"):
            BatchCutter(X, None, 1).put((tensor,))
    strange = torch.ones(2, dtype=torch.complex64).conj().imag  # negative by a bit that numpy knows nothing of
    with pytest.raises(SourceError, match="resolve_neg"):
        BatchCutter(X, None, 1).put((strange,))


def converted(values: Any, dtype: str, datatype: str) -> Any:
    array = np.asarray(values, dtype)
    spec = ModelSpec("m", "1", {"x": TensorMetadata("x", datatype, array.shape[1:])}, {})
    return select_inputs(spec, {"x": array})["x"]


@pytest.mark.parametrize(
    ("values", "dtype", "datatype", "named"),
    [
        ([1, 2**32 + 1], "int64", "INT32", "4294967297 as int64"),
        ([1, 2**63], "uint64", "INT64", "9223372036854775808 as uint64"),
        ([-1], "int64", "UINT64", "-1 as int64"),
        ([1.0, np.nan, 1e300], "float64", "FP32", r"1e\+300 as float64"),
        ([70000.0], "float32", "FP16", "70000.0"),
        ([2**24, 2**24 + 1], "int64", "FP32", "16777217"),
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
        ([0.1, np.inf, -np.inf, np.nan], "float64", "FP32"),
        ([2**24 + 2, -(2**62), -(2**63)], "int64", "FP32"),
        ([2**63, 0], "uint64", "FP64"),
        ([7, 8], ">i4", "INT32"),
    ],
)
def test_equal_values_are_converted(values: Any, dtype: str, datatype: str) -> None:
    result = converted(values, dtype, datatype)
    assert result.dtype == dtype_of(datatype)
    np.testing.assert_array_equal(result, np.asarray(values, dtype).astype(result.dtype))


def test_string_that_is_no_text_is_named() -> None:
    for array in (np.array(["good", "\ud800bad"]), np.array(["good", "\ud800bad"], object)):
        with pytest.raises(
            SourceError, match=r"input 'words' has a string that is not valid text, '\\ud800bad'.*send bytes"
        ):
            Payload.of({"words": array}, None)
