"""Messages that are alike but for an id and the bytes of tensors: recognized at a glance.

A teacher's answers to requests of a shape have the same fields in the same places, and so have a student's requests
in shared memory. To walk through the fields of all in Python is a good part of what a request costs there. So what was
found in a message is kept, and serves for others whose bytes are the same wherever neither the id nor a tensor lies:
taken apart, they would give the same. What does not belong here: how a message is taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["HeaderSet", "MessageLayout", "LayoutCache"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_MOST_KEPT = 1024
"""A peer whose messages are never alike must not fill the memory: with `_MOST_NBYTES`, two megabytes are the most."""
_MOST_NBYTES = 2048
"""Of a header that is kept: honest ones have some hundred bytes, and comparing a larger one costs what parsing does."""


@dataclass(frozen=True)
class MessageLayout:
    """What taking messages of the same size apart gives.

    Attributes:
        header: the message's header.
        fixed: pieces that are the same in all: where a piece begins and ends, and its bytes.
        id_at: where the id begins and ends.
        raw: where the tensors begin and end.
    """

    header: bytes
    fixed: tuple[tuple[int, int, bytes], ...]
    id_at: tuple[int, int]
    raw: tuple[tuple[int, int], ...]


class LayoutCache:
    """The last layout for every size of message."""

    def __init__(self) -> None:
        self._by_size: dict[int, MessageLayout] = {}

    def find(self, data: Buffer) -> MessageLayout | None:
        """Return the layout of this message, if one was learnt from its like."""
        layout = self._by_size.get(len(data))
        if layout is not None:
            for start, stop, piece in layout.fixed:
                if data[start:stop] != piece:
                    return None
        return layout

    def learn(self, data: Buffer, header: bytes, parts: Sequence[bytes | int]) -> None:
        """Keep the layout of a message that was taken apart; not if it was put together in another way.

        Args:
            data: the message.
            header: of the message.
            parts: what it is expected to consist of: bytes that are the same in others like it and, as their sizes, its
                id (0 where it has none) and behind it its tensors.
        """
        at, fixed, others = 0, [], []
        for part in parts:
            begin = at
            if isinstance(part, int):
                at += part
                others.append((begin, at))
                continue
            at += len(part)
            if data[begin:at] != part:
                return
            fixed.append((begin, at, part))
        if at != len(data) or sum(len(piece) for _, _, piece in fixed) > _MOST_NBYTES:
            return
        if len(self._by_size) >= _MOST_KEPT:
            self._by_size.clear()
        self._by_size[at] = MessageLayout(header, tuple(fixed), others[0], tuple(others[1:]))


class HeaderSet:
    """Headers that were found to have neither an id nor tensors in them."""

    def __init__(self) -> None:
        self._heads: set[bytes] = set()

    def __contains__(self, head: bytes) -> bool:
        return head in self._heads

    def learn(self, head: bytes) -> None:
        """Keep a header."""
        if len(head) > _MOST_NBYTES:
            return
        if len(self._heads) >= _MOST_KEPT:
            self._heads.clear()
        self._heads.add(head)
