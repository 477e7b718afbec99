"""The wire format: our cutting and joining of bytes, bundles and fragments against protobuf's reading and writing."""

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
from edl.protocol import bundles, codec, fragments, kserve, names, tensors
from edl.protocol.fragments import Defragmenter
from edl.protocol.layouts import HeaderSet, LayoutCache

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


ids = st.text(max_size=20)

NESTED = bundles.join_responses([bundles.join_responses([codec.join_streamed_response(b"", [])])])


def bundled_response(number: str, raw: list[bytes], error: str) -> bytes:
    message = kserve.ModelStreamInferResponse.FromString(codec.join_streamed_response(b"", raw, codec.id_field(number)))
    message.error_message = error
    return message.SerializeToString()


@settings(max_examples=40)
@given(st.lists(st.tuples(ids, blobs), min_size=1, max_size=6))
def test_requests_come_out_as_they_went_in(requests: list[tuple[str, list[bytes]]]) -> None:
    messages = [codec.join_request(codec.id_field(number), raw) for number, raw in requests]
    bundle = bundles.join_requests(messages)
    header, found, number = codec.split_streamed_request(bundle)
    assert bundles.is_bundle(header)
    assert number == ""
    assert [bytes(message) for message in found] == messages
    for (number, raw), message in zip(requests, found, strict=True):
        left, views, own = codec.split_streamed_request(message)
        assert not bundles.is_bundle(left)
        assert ([bytes(view) for view in views], own) == (raw, number)


@settings(max_examples=40)
@given(st.lists(st.tuples(ids, blobs, st.text(max_size=20)), min_size=1, max_size=6))
def test_answers_survive_a_bundle(wanted: list[tuple[str, list[bytes], str]]) -> None:
    messages = [bundled_response(*answer) for answer in wanted]
    together = bundles.split_responses(bundles.join_responses(messages))
    assert together == [part for message in messages for part in bundles.split_responses(message)]
    assert [(number, [bytes(view) for view in raw], error) for _, raw, number, error in together] == wanted


@pytest.mark.parametrize(
    "data",
    [
        NESTED,
        bundles.join_responses([]),
        bundles.join_responses([b"\xff"]),
        codec.join_streamed_response(
            kserve.ModelInferResponse(
                parameters={names.BUNDLE: kserve.InferParameter(bool_param=True)}
            ).SerializeToString(),
            [b""],
            codec.id_field("7"),
        ),
    ],
    ids=["nested", "empty", "damaged", "with an id"],
)
def test_malformed_bundle_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        bundles.split_responses(data)


LIMIT_NBYTES = 10_000


def cut(header: bytes, raw: list[bytes], request_id: str, nbytes: int) -> list[bytes]:
    return list(fragments.fragment_request(header, raw, request_id, nbytes))


def buffers_of(fragment: bytes) -> tuple[list[memoryview], str]:
    header, raw, request_id = codec.split_streamed_request(fragment)
    assert fragments.is_fragment(header)
    return raw, request_id


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=4), st.text(min_size=1, max_size=20), st.integers(1, 500))
def test_fragments_join_to_the_request(raw: list[bytes], request_id: str, nbytes: int) -> None:
    header = kserve.ModelInferRequest(model_name="m").SerializeToString() + codec.id_field(request_id)
    whole = codec.join_request(header, raw)
    messages = cut(header, raw, request_id, nbytes)
    assert len(messages) == -(-len(whole) // nbytes)
    defragmenter = Defragmenter(LIMIT_NBYTES)
    found = [defragmenter.add(*buffers_of(message)) for message in messages]
    assert found[:-1] == [None] * (len(messages) - 1)
    assert found[-1] == whole
    assert found[-1].readonly, "models must not write into a request"
    assert codec.split_streamed_request(found[-1]) == codec.split_streamed_request(whole)


def test_replaced_fragments_start_again() -> None:
    defragmenter = Defragmenter(LIMIT_NBYTES)
    first, second = cut(b"", [b"a" * 100], "1", 40), cut(b"", [b"b" * 100], "2", 40)
    assert defragmenter.add(*buffers_of(first[0])) is None
    found = [defragmenter.add(*buffers_of(message)) for message in second]
    assert found[-1] == codec.join_request(b"", [b"b" * 100]), "another request takes the place of one that is cut off"
    defragmenter.add(*buffers_of(first[0]))
    defragmenter.drop("2")
    defragmenter.drop("1")
    found = [defragmenter.add(*buffers_of(message)) for message in first]
    assert found[-1] == codec.join_request(b"", [b"a" * 100]), "the piece that came before is not part of it"


def test_bytes_are_held_while_fragments_wait() -> None:
    held: list[int] = []
    defragmenter = Defragmenter(LIMIT_NBYTES, held.append, held.remove)
    first, *others = cut(b"", [b"a" * 100], "1", 40)
    defragmenter.add(*buffers_of(first))
    assert held == [len(codec.join_request(b"", [b"a" * 100]))]
    for message in others:
        assert sum(held)
        whole = defragmenter.add(*buffers_of(message))
    assert whole is not None
    assert not held, "who takes the request counts it"
    defragmenter.add(*buffers_of(first))
    defragmenter.add(*buffers_of(cut(b"", [b"b" * 50], "2", 40)[0]))
    assert held == [len(codec.join_request(b"", [b"b" * 50]))], "the other takes its place"
    with pytest.raises(ProtocolError):
        defragmenter.add([size(held[0]), memoryview(bytes(held[0]))], "2")
    assert not held
    defragmenter.add(*buffers_of(first))
    defragmenter.drop()
    defragmenter.drop()
    assert not held


def test_refused_request_is_ignored() -> None:
    def refuse(nbytes: int) -> None:
        if nbytes > 90:
            raise BufferError(nbytes)

    released: list[int] = []
    defragmenter = Defragmenter(LIMIT_NBYTES, refuse, released.append)
    first, *others = cut(b"", [b"a" * 100], "1", 40)
    with pytest.raises(BufferError):
        defragmenter.add(*buffers_of(first))
    assert [defragmenter.add(*buffers_of(message)) for message in others] == [None] * len(others)
    assert not released, "nothing was held"
    with pytest.raises(BufferError):
        defragmenter.add(*buffers_of(first))  # the same request once more, from its begin
    found = [defragmenter.add(*buffers_of(message)) for message in cut(b"", [b"b" * 50], "2", 40)]
    assert found[-1] == codec.join_request(b"", [b"b" * 50])


def size(nbytes: int) -> memoryview:
    return memoryview(nbytes.to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("raw", "request_id"),
    [
        ([], "1"),
        ([memoryview(b"\3"), memoryview(b"abc")], "1"),
        ([size(3), memoryview(b"abc")], ""),
        ([size(3), memoryview(b"abcd")], "1"),
        ([size(3), memoryview(b"")], "1"),
        ([size(0), memoryview(b"")], "1"),
        ([size(LIMIT_NBYTES + 1), memoryview(b"abc")], "1"),
    ],
)
def test_malformed_fragment_is_refused(raw: list[memoryview], request_id: str) -> None:
    defragmenter = Defragmenter(LIMIT_NBYTES)
    with pytest.raises(ProtocolError, match=names.FRAGMENT):
        defragmenter.add(raw, request_id)
    for taking in (defragmenter, Defragmenter(3)):
        assert taking.add([size(3), memoryview(b"abc")], "1") == b"abc"


IDS = st.sampled_from(["", "7", "0000000a", "0000000b", "äöüß"])

TENSORS = st.lists(st.binary(max_size=6), max_size=3)

ERRORS = st.sampled_from(["", "", "boom"])


def layout_response(number: str, raw: list[bytes], name: str, error: str = "", *, own: bool = False) -> bytes:
    """A streamed response as our servers make it or, with `own`, as protobuf does."""
    plain = kserve.ModelInferResponse(model_name=name)
    if not own and not error:
        return codec.join_streamed_response(plain.SerializeToString(), raw, codec.id_field(number) if number else b"")
    plain.id = number
    plain.raw_output_contents.extend(raw)
    whole = kserve.ModelStreamInferResponse(infer_response=plain, error_message=error)
    return bytes(whole.SerializeToString())


def request(number: str, raw: list[bytes], name: str, *, own: bool = False) -> bytes:
    plain = kserve.ModelInferRequest(model_name=name)
    if own:
        return bytes(kserve.ModelInferRequest(model_name=name, id=number, raw_input_contents=raw).SerializeToString())
    return codec.join_request(plain.SerializeToString() + codec.id_field(number), raw)


@settings(max_examples=40)
@given(st.lists(st.tuples(IDS, TENSORS, st.sampled_from(["m", "n", "mm"]), ERRORS, st.booleans()), max_size=12))
def test_known_responses_are_read_alike(given_: list[tuple[str, list[bytes], str, str, bool]]) -> None:
    for number, raw, name, error, own in given_:
        data = layout_response(number, raw, name, error, own=own)
        whole = kserve.ModelStreamInferResponse.FromString(data).infer_response
        assert (whole.id, list(whole.raw_output_contents)) == (number, raw)
        for form in (data, memoryview(data), bytearray(data)):
            header, views, found, said = codec.split_streamed_response(form)
            assert codec.parse_response(header) == kserve.ModelInferResponse(model_name=name)
            assert ([bytes(view) for view in views], found, said) == (raw, number, error)


@settings(max_examples=40)
@given(st.lists(st.tuples(IDS, TENSORS, st.sampled_from(["m", "n", "mm"]), st.booleans()), max_size=12))
def test_known_requests_are_read_alike(given_: list[tuple[str, list[bytes], str, bool]]) -> None:
    for number, raw, name, own in given_:
        data = request(number, raw, name, own=own)
        whole = kserve.ModelInferRequest.FromString(data)
        assert (whole.id, list(whole.raw_input_contents)) == (number, raw)
        for form in (data, memoryview(data), bytearray(data)):
            header, views, found = codec.split_streamed_request(form)
            assert codec.parse_request(header) == kserve.ModelInferRequest(model_name=name)
            assert ([bytes(view) for view in views], found) == (raw, number)


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_is_never_overlooked(at: int, value: int) -> None:
    """Whatever a damaged message is read as, it is what a reader that knows no other message makes of it."""
    for whole, split in (
        (layout_response("0000000a", [b"abc", b"", b"defg"], "model"), codec.split_streamed_response),
        (bundles.join_responses([layout_response("0000000a", [b"abc"], "model")] * 2), codec.split_streamed_response),
        (request("0000000a", [], "model"), codec.split_streamed_request),
    ):
        damaged = bytearray(whole)
        damaged[at % len(whole)] = value
        outcomes = []
        for known in (False, True):
            codec._layouts, codec._heads = LayoutCache(), HeaderSet()
            if known:
                split(whole)
            try:
                found = split(bytes(damaged))
                outcomes.append((found[0], [bytes(view) for view in found[1]], *found[2:]))
            except ProtocolError as exc:
                outcomes.append((str(exc),))
        assert outcomes[0] == outcomes[1]


def test_an_id_alone_is_no_known_head() -> None:
    """What one client sends must not change how another one's message is read, whose tensor ends like an id."""
    ends_like_an_id = bytes(4000) + codec.id_field("AAAAAAAA")
    whole = request("0000000a", [ends_like_an_id], "model")
    codec._heads = HeaderSet()
    before = codec.split_streamed_request(whole)
    codec.split_streamed_request(codec.id_field("12345678"))
    assert codec.split_streamed_request(whole) == before
    assert [bytes(tensor) for tensor in before[1]] == [ends_like_an_id]


def test_strange_messages_do_not_fill_memory() -> None:
    layouts, heads = LayoutCache(), HeaderSet()
    for size in range(3000):
        data = b"h" * size + b"id"
        layouts.learn(data, b"", [b"h" * size, 2])
        heads.learn(b"h" * size)
    assert len(layouts._by_size) <= 1024
    assert len(heads._heads) <= 1024
    assert layouts.find(b"h" * 2500 + b"id") is None, "too large to be kept"
