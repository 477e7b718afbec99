"""The wire format: our cutting and joining of bytes against protobuf's own reading and writing."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.distill.dispatch.actions import RequestFailure
from edl.distill.transport.stream import InferStream, _PendingRequest
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
    assert kserve.ModelInferRequest.FromString(codec.encode_request(header(), raw)) == whole
    found, views = codec.decode_request(whole.SerializeToString())
    assert found == header()
    assert [bytes(view) for view in views] == raw
    answer = kserve.ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP16", shape=[1])
    again, views = codec.decode_response(codec.encode_response(answer, raw))
    assert again == answer
    assert [bytes(view) for view in views] == raw


ids = st.text(max_size=20)


@few
@given(ids, blobs)
def test_streamed_request_gives_id_and_rest(number: str, raw: list[bytes]) -> None:
    plain = header()
    plain.ClearField("id")
    whole = header()
    whole.id = number
    whole.raw_input_contents.extend(raw)
    ours = codec.join_request(plain.SerializeToString() + codec.id_field(number), raw)
    assert kserve.ModelInferRequest.FromString(ours) == whole
    for data in (ours, whole.SerializeToString()):
        left, views, found = codec.split_streamed_request(data)
        assert codec.parse_request(left) == plain, "so that requests alike in all but their ids have one header"
        assert [bytes(view) for view in views] == raw
        assert found == number


@few
@given(ids, blobs, st.text(max_size=20))
def test_streamed_response_has_id_and_error(number: str, raw: list[bytes], error: str) -> None:
    plain = kserve.ModelInferResponse(model_name="m")
    plain.outputs.add(name="y", datatype="FP16", shape=[1])
    ours = codec.join_streamed_response(plain.SerializeToString(), raw, codec.id_field(number))
    whole = kserve.ModelStreamInferResponse.FromString(ours)
    assert whole.infer_response.id == number
    assert list(whole.infer_response.raw_output_contents) == raw
    whole.error_message = error
    left, views, found, said = codec.split_streamed_response(whole.SerializeToString())
    assert codec.parse_response(left) == plain
    assert [bytes(view) for view in views] == raw
    assert (found, said) == (number, error)


@few
@given(st.binary(max_size=200))
@example(codec.id_field("x")[:-1] + b"\xff")  # an id that is no UTF-8
@example(b"\x12\x05\x1a\xff\xff\xff\x0f")  # a response whose id claims more than there is
@example(b"\xba\x80\x00\x01a")  # a tag that takes more bytes than it needs
def test_any_streamed_bytes_read_or_refused(data: bytes) -> None:
    try:
        left, views, number = codec.split_streamed_request(data)
        codec.parse_request(left)
    except ProtocolError:
        pass
    else:
        whole = kserve.ModelInferRequest.FromString(data)
        assert [bytes(view) for view in views] == list(whole.raw_input_contents)
        assert number == whole.id
    try:
        left, views, number, error = codec.split_streamed_response(data)
        codec.parse_response(left)
    except ProtocolError:
        return
    assert all(view.nbytes <= len(data) for view in views)
    assert isinstance(number, str)
    assert isinstance(error, str)


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


def test_bfloat16_is_read_as_float32() -> None:
    assert tensors.from_raw("BF16", [2], np.array([0x3F80, 0xC000], "<u2").tobytes()).tolist() == [1.0, -2.0]


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
    with pytest.raises(ProtocolError, match="takes 4 elements, int_contents has 3"):
        tensors.from_contents("INT8", [2, 2], contents)
    with pytest.raises(ProtocolError, match="FP16 cannot be sent"):
        tensors.from_contents("FP16", [1], contents)


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


def test_messages_are_those_of_tritonclient() -> None:
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
    ours = header()
    ours.raw_input_contents.append(b"abc")
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert kserve.ModelInferRequest.FromString(theirs.SerializeToString()) == ours
    assert theirs.inputs[0].parameters["p"].int64_param == -5


def test_impossible_shape_is_malformed() -> None:
    for shape in ([1] * 70, [2**62, 0], [0, 2**62, 2]):
        with pytest.raises(ProtocolError):
            tensors.from_raw("FP32", shape, b"" if 0 in shape else bytes(4))


def test_unreadable_error_ends_its_request() -> None:
    """And neither another one nor the stream."""
    ended: dict[str, object] = {}
    stream = InferStream.__new__(InferStream)
    stream._endpoint = "teacher:1"
    numbers = ("00000000", "00000001")
    stream._waiting = {
        one: _PendingRequest(functools.partial(ended.__setitem__, one), b"", (), 0, 0.0, 1.0) for one in numbers
    }
    header = codec.id_field("00000000") + b"\x0a\x01\xff"  # a model's name that is no UTF-8
    stream._receive(b"\x0a\x01x" + b"\x12" + bytes([len(header)]) + header)
    stream._receive(codec.join_streamed_response(b"", [b"tensor"], codec.id_field("00000001")))
    assert isinstance(ended["00000000"], RequestFailure)
    assert isinstance(ended["00000001"], tuple)
