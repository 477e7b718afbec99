"""A large request of a stream in several messages, which stay in the processor's caches.

A message of 19 MB is copied five times between two processes that speak gRPC from Python, every time out of memory and
back; the same bytes in pieces of some megabytes are copied within the caches, once more to be put together.

A fragment is a message of the stream's own type with the parameter `names.FRAGMENT`, the request's id and, in the place
of its raw tensors, two buffers: the size of the whole request, and the next piece of its bytes, serialized as it would
go alone. The fragments of a request come in a row, with nothing but messages without fragments in between. Only to
a server with `names.EXTENSION_FRAGMENT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer

__all__ = ["Defragmenter", "fragment_request", "is_fragment"]

_HEADER = kserve.ModelInferRequest(
    parameters={names.FRAGMENT: kserve.InferParameter(bool_param=True)}
).SerializeToString()
_SIZE_NBYTES = 8  # of the request's size as a number without sign; fewer would limit it to 4 GiB


def fragment_request(header: bytes, raw: Sequence[Buffer], request_id: str, nbytes: int) -> Iterator[bytes]:
    """Cut what `codec.join_request` would give into messages.

    Args:
        header: of the request, serialized, with its id.
        raw: its tensors; read as the iterator goes on.
        request_id: the same id.
        nbytes: of the request in every message but the last.

    Yields:
        The fragments, in order.
    """
    parts = [memoryview(part).cast("B") for part in codec.request_parts(header, raw)]
    total = sum([len(part) for part in parts])
    head = codec.join_request(_HEADER + codec.id_field(request_id), [total.to_bytes(_SIZE_NBYTES, "little")])
    for begin in range(0, total, nbytes):
        end = min(begin + nbytes, total)
        yield b"".join((head, codec.raw_input_head(end - begin), *_between(parts, begin, end)))


def is_fragment(header: bytes) -> bool:
    """Whether the raw tensors beside this header are a piece of a request; see `codec.split_streamed_request`."""
    return header == _HEADER


class Defragmenter:
    """Puts the fragments of requests together, a request at a time.

    Args:
        limit_nbytes: of a whole request.
        hold_bytes: called with the size of a request when its first fragment comes, before there is memory for it; what
            it raises leaves `add`, and the request's other fragments are ignored.
        release_bytes: called with that size when the request is whole, or dropped.
    """

    def __init__(
        self,
        limit_nbytes: int,
        hold_bytes: Callable[[int], None] = lambda _: None,
        release_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._limit_nbytes = limit_nbytes
        self._hold_bytes = hold_bytes
        self._release_bytes = release_bytes
        self._request_id = ""
        self._total = 0
        self._at = 0
        self._held = 0
        self._whole: memoryview | None = None  # None for a request that `hold_bytes` refused

    def add(self, raw: Sequence[memoryview], request_id: str) -> memoryview | None:
        """Take a fragment in.

        A fragment of another request than the fragment before takes the place of what that began.

        Returns:
            The whole request's bytes, read-only, if this fragment is its last.

        Raises:
            ProtocolError: it is no fragment, or of a request that is too large.
        """
        if len(raw) != 2 or len(raw[0]) != _SIZE_NBYTES or not request_id:
            raise ProtocolError(
                f"malformed message: {names.FRAGMENT} with {len(raw)} buffers, or without an id or a size"
            )
        total, piece = int.from_bytes(raw[0], "little"), raw[1]
        if total > self._limit_nbytes:
            raise ProtocolError(f"{names.FRAGMENT} of {total:,} bytes, at most {self._limit_nbytes:,}")
        is_first = request_id != self._request_id or total != self._total
        if is_first:
            self.drop()
            self._request_id = request_id
            self._total = total
        begin = self._at
        end = begin + len(piece)
        if end > total or not piece:
            self.drop()
            raise ProtocolError(f"malformed message: {names.FRAGMENT} ends at byte {end:,} of {total:,}")
        self._at = end
        if is_first:
            self._hold_bytes(total)
            self._held = total
            # Not a bytearray, which would be filled with zeros first. Memory is used as far as pieces have come.
            self._whole = np.empty(total, np.uint8).data
        whole = self._whole
        if whole is not None:
            whole[begin:end] = piece
        if end < total:
            return None
        self.drop()
        return whole.toreadonly() if whole is not None else None

    def drop(self, request_id: str | None = None) -> None:
        """Forget what came of a request that is no longer waited for.

        Args:
            request_id: of the request; another's fragments stay. None for the present request, whatever its id is.
        """
        if request_id is not None and request_id != self._request_id:
            return
        if self._held:
            self._release_bytes(self._held)
        self._request_id = ""
        self._total = 0
        self._at = 0
        self._held = 0
        self._whole = None


def _between(parts: Sequence[memoryview], begin: int, end: int) -> Iterator[memoryview]:
    at = 0
    for part in parts:
        if at < end and at + len(part) > begin:
            yield part[max(begin - at, 0) : end - at]
        at += len(part)
