"""Messages that are recognized: taken apart as if nothing were known of them, whatever came before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.protocol import bundles, codec, kserve
from edl.protocol.layouts import HeaderSet, LayoutCache

ids = st.sampled_from(["", "7", "0000000a", "0000000b", "äöüß"])
tensors = st.lists(st.binary(max_size=6), max_size=3)
errors = st.sampled_from(["", "", "boom"])


def response(number: str, raw: list[bytes], name: str, error: str = "", *, own: bool = False) -> bytes:
    """A streamed response as our servers make it or, with `own`, as protobuf does."""
    plain = kserve.ModelInferResponse(model_name=name)
    if not own and not error:
        return codec.join_streamed_response(plain.SerializeToString(), raw, codec.id_field(number) if number else b"")
    plain.id = number
    plain.raw_output_contents.extend(raw)
    whole = kserve.ModelStreamInferResponse(infer_response=plain, error_message=error)
    return bytes(whole.SerializeToString())


def request(number: str, raw: list[bytes], name: str) -> bytes:
    plain = kserve.ModelInferRequest(model_name=name)
    return codec.join_request(plain.SerializeToString() + codec.id_field(number), raw)


@settings(max_examples=40)
@given(st.lists(st.tuples(ids, tensors, st.sampled_from(["m", "n", "mm"]), errors, st.booleans()), max_size=12))
def test_known_responses_are_read_alike(given_: list[tuple[str, list[bytes], str, str, bool]]) -> None:
    for number, raw, name, error, own in given_:
        data = response(number, raw, name, error, own=own)
        for form in (data, memoryview(data), bytearray(data)):
            header, views, found, said = codec.split_streamed_response(form)
            assert codec.parse_response(header) == kserve.ModelInferResponse(model_name=name)
            assert ([bytes(view) for view in views], found, said) == (raw, number, error)


@settings(max_examples=40)
@given(st.lists(st.tuples(ids, tensors, st.sampled_from(["m", "n", "mm"])), max_size=12))
def test_known_requests_are_read_alike(given_: list[tuple[str, list[bytes], str]]) -> None:
    for number, raw, name in given_:
        data = request(number, raw, name)
        for form in (data, memoryview(data), bytearray(data)):
            header, views, found = codec.split_streamed_request(form)
            assert codec.parse_request(header) == kserve.ModelInferRequest(model_name=name)
            assert ([bytes(view) for view in views], found) == (raw, number)


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_is_never_overlooked(at: int, value: int) -> None:
    """Whatever a damaged message is read as, it is what a reader that knows no other message makes of it."""
    for whole, split in (
        (response("0000000a", [b"abc", b"", b"defg"], "model"), codec.split_streamed_response),
        (bundles.join_responses([response("0000000a", [b"abc"], "model")] * 2), codec.split_streamed_response),
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
