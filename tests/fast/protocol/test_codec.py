"""The wire format: our cutting and joining of bytes against protobuf's reading and writing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.errors import ProtocolError
from edl.protocol import codec, kserve, tensors

few = settings(max_examples=40)

blobs = st.lists(st.binary(max_size=300), max_size=4)


def header(model: str = "m") -> kserve.ModelInferRequest:
    message = kserve.ModelInferRequest(model_name=model, id="7")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    tensor.parameters["p"].int64_param = -5
    message.parameters["q"].string_param = "words"
    return message


@few
@given(blobs)
def test_messages_are_those_of_protobuf(raw: list[bytes]) -> None:
    whole = header()
    whole.raw_input_contents.extend(raw)
    assert kserve.ModelInferRequest.FromString(codec.REQUEST.join(header().SerializeToString(), raw)) == whole
    found, views = codec.REQUEST.split(whole.SerializeToString())
    assert codec.REQUEST.parse(found) == header()
    assert [bytes(view) for view in views] == raw
    answer = kserve.ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP16", shape=[1])
    again, views = codec.RESPONSE.split(codec.RESPONSE.join(answer.SerializeToString(), raw))
    assert codec.RESPONSE.parse(again) == answer
    assert [bytes(view) for view in views] == raw
    streamed = codec.join_streamed_response(answer.SerializeToString(), raw)
    answer.raw_output_contents.extend(raw)
    assert kserve.ModelStreamInferResponse.FromString(streamed).infer_response == answer


@few
@given(st.binary(max_size=200))
@example(codec.id_field("x")[:-1] + b"\xff")  # an id that is no UTF-8
@example(b"\x1a\xff\xff\xff\x0f")  # an id that claims more than there is
@example(b"\xba\x80\x00\x01a")  # a tag that takes more bytes than it needs
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        left, views = codec.REQUEST.split(data)
        codec.REQUEST.parse(left)
    except ProtocolError:
        pass
    else:
        whole = kserve.ModelInferRequest.FromString(data)
        assert [bytes(view) for view in views] == list(whole.raw_input_contents)
    try:
        left, views = codec.RESPONSE.split(data)
        codec.RESPONSE.parse(left)
    except ProtocolError:
        return
    assert [bytes(view) for view in views] == list(kserve.ModelInferResponse.FromString(data).raw_output_contents)


DTYPES = ["<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "?", ">f4", ">i2"]


@few
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, min_side=0))))
def test_arrays_survive_the_journey(array: np.ndarray) -> None:
    datatype = tensors.datatype_of(array.dtype)
    back = tensors.from_raw(datatype, array.shape, tensors.to_raw(array))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("<")


@few
@given(st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=20)), max_size=6))
def test_strings_survive_the_journey(values: list[bytes | str]) -> None:
    array = np.empty(len(values), np.object_)
    array[:] = values
    back = tensors.from_raw("BYTES", [len(values)], tensors.to_raw(array))
    assert back.tolist() == [value.encode() if isinstance(value, str) else value for value in values]


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "words"),
    [
        ("FP32", [2], b"1234567", "takes 8 bytes, not 7"),
        ("FP32", [-1], b"", "negative"),
        ("FP31", [1], b"1234", "unknown datatype 'FP31'"),
        ("FP32", [2**40, 2**40], b"1234", "bytes, not 4"),
        ("BYTES", [2], b"\x01\0\0\0a", "at least 8 bytes"),
        ("BYTES", [1], b"\x09\0\0\0a", "claims 9 bytes"),
        ("BYTES", [1], b"\x01\0\0\0ab", "1 bytes too many"),
    ],
)
def test_wrong_tensor_sizes_are_refused(datatype: str, shape: list[int], raw: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        tensors.from_raw(datatype, shape, raw)


def test_typed_contents_are_read_and_checked() -> None:
    contents = kserve.InferTensorContents(int_contents=[1, -2, 3])
    assert tensors.from_contents("INT8", [3], contents).tolist() == [1, -2, 3]
    with pytest.raises(ProtocolError, match="takes 4 elements, but int_contents has 3"):
        tensors.from_contents("INT8", [2, 2], contents)
    with pytest.raises(ProtocolError, match="FP16 cannot be sent"):
        tensors.from_contents("FP16", [1], contents)
    assert tensors.from_raw("BF16", [2], np.array([0x3F80, 0xC000], "<u2").tobytes()).tolist() == [1.0, -2.0]


NUMBERS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64, "UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_typed_numbers_never_wrap(datatype: str) -> None:
    bits, signed = NUMBERS[datatype], not datatype.startswith("U")
    field = ("" if signed else "u") + ("int64_contents" if bits == 64 else "int_contents")
    limits = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1]
    contents = kserve.InferTensorContents(**{field: limits})
    assert tensors.from_contents(datatype, [2], contents).tolist() == limits
    if bits < 32:  # else the field itself has no room
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 1 warns, and goes on; a server's log is no error to the student
            for value in (limits[0] - 1, limits[1] + 1)[0 if signed else 1 :]:
                with pytest.raises(ProtocolError, match=f"does not fit {datatype}: {value}"):
                    tensors.from_contents(datatype, [1], kserve.InferTensorContents(**{field: [value]}))


def test_impossible_shape_is_malformed() -> None:
    for shape in ([1] * 70, [2**62, 0], [0, 2**62, 2]):
        with pytest.raises(ProtocolError):
            tensors.from_raw("FP32", shape, b"" if 0 in shape else bytes(4))
