"""Several messages of a stream in a single message: what is ready together costs the work of a message, not of many.

A bundle is a message of the stream's own type with the parameter `names.BUNDLE` and nothing else but the bundled
messages, serialized, in the place of its raw tensors. Bundles are not nested. Only between peers that said that they
know them: a client sends them to a server with `names.EXTENSION_BUNDLE`, a server to a client that sent
`names.BUNDLES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer, StreamedResponse

__all__ = ["MOST_REQUEST_NBYTES", "is_bundle", "join_requests", "join_responses", "split_responses"]

MOST_REQUEST_NBYTES = 64 << 10
"""Of a bundle of requests. More of them in one message than a client has any use for would hold the server up."""
_MOST_RESPONSE_NBYTES = 4 << 20
"""Of a bundle of answers: a server gathers up to 1 MiB; what is much larger is no bundle of an honest one."""

_PARAMETERS = {names.BUNDLE: kserve.InferParameter(bool_param=True)}
_REQUEST = kserve.ModelInferRequest(parameters=_PARAMETERS).SerializeToString()
_RESPONSE = kserve.ModelInferResponse(parameters=_PARAMETERS).SerializeToString()


def join_requests(messages: Sequence[Buffer]) -> bytes:
    """Return a bundle of serialized `ModelInferRequest`s."""
    return codec.join_request(_REQUEST, messages)


def join_responses(messages: Sequence[Buffer]) -> bytes:
    """Return a bundle of serialized `ModelStreamInferResponse`s."""
    return codec.join_streamed_response(_RESPONSE, messages)


def is_bundle(header: bytes) -> bool:
    """Whether the raw tensors beside this header of a request are messages; see `codec.split_streamed_request`."""
    return header == _REQUEST


def split_responses(data: Buffer) -> list[StreamedResponse]:
    """Take apart a `ModelStreamInferResponse`, or all of a bundle, as by `codec.split_streamed_response`.

    Raises:
        ProtocolError: `data` is no such message, or a bundle with nothing or another bundle in it.
    """
    found = codec.split_streamed_response(data)
    header, messages, number, error = found
    if header != _RESPONSE or error:
        return [found]
    if len(data) > _MOST_RESPONSE_NBYTES:
        raise ProtocolError(f"malformed message: {names.BUNDLE} of {len(data):,} bytes")
    if not messages or number:
        raise ProtocolError(f"malformed message: {names.BUNDLE} with {len(messages)} messages and the id {number!r}")
    parts = [codec.split_streamed_response(message) for message in messages]
    if any(part[0] == _RESPONSE for part in parts):
        raise ProtocolError(f"malformed message: {names.BUNDLE} within {names.BUNDLE}")
    return parts
