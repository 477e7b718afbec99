"""Several messages of a stream in one: what goes in comes out, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.protocol import bundles, codec, kserve, names

blobs = st.lists(st.binary(max_size=300), max_size=4)
ids = st.text(max_size=20)
answers = st.lists(st.tuples(ids, blobs, st.text(max_size=20)), min_size=1, max_size=6)

NESTED = bundles.join_responses([bundles.join_responses([codec.join_streamed_response(b"", [])])])


def response(number: str, raw: list[bytes], error: str) -> bytes:
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
@given(answers)
def test_answers_survive_a_bundle(wanted: list[tuple[str, list[bytes], str]]) -> None:
    messages = [response(*answer) for answer in wanted]
    together = bundles.split_responses(bundles.join_responses(messages))
    assert together == [part for message in messages for part in bundles.split_responses(message)]
    assert [(number, [bytes(view) for view in raw], error) for _, raw, number, error in together] == wanted


def test_bundle_has_its_streams_type() -> None:
    request = kserve.ModelInferRequest.FromString(bundles.join_requests([b"abc", b"de"]))
    assert request.parameters[names.BUNDLE].bool_param
    assert list(request.raw_input_contents) == [b"abc", b"de"]
    answer = kserve.ModelStreamInferResponse.FromString(bundles.join_responses([b"abc"])).infer_response
    assert answer.parameters[names.BUNDLE].bool_param
    assert list(answer.raw_output_contents) == [b"abc"]


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
