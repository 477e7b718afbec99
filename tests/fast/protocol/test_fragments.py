"""A request in several messages: what is put together is what was cut, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.protocol import codec, fragments, kserve, names
from edl.protocol.fragments import Defragmenter

LIMIT_NBYTES = 10_000
ids = st.text(min_size=1, max_size=20)


def cut(header: bytes, raw: list[bytes], request_id: str, nbytes: int) -> list[bytes]:
    return list(fragments.fragment_request(header, raw, request_id, nbytes))


def buffers_of(fragment: bytes) -> tuple[list[memoryview], str]:
    header, raw, request_id = codec.split_streamed_request(fragment)
    assert fragments.is_fragment(header)
    return raw, request_id


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=4), ids, st.integers(1, 500))
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


def test_fragment_is_of_the_streams_type() -> None:
    message = kserve.ModelInferRequest.FromString(cut(b"", [b"abcd"], "7", 3)[0])
    assert message.parameters[names.FRAGMENT].bool_param
    assert message.id == "7"
    assert list(message.raw_input_contents) == [(6).to_bytes(8, "little"), b"\x3a\x04a"]


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
    assert defragmenter.add([size(3), memoryview(b"abc")], "1") == b"abc"
