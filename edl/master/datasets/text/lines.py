"""Text by lines: a unit ends at a newline, the last one at the end of its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, ClassVar

import numpy as np

from edl.errors import SourceError
from edl.master.datasets.index import Numbers
from edl.master.datasets.text.files import TextDataset, TextPiece
from edl.quoting import quote

__all__ = ["LinesDataset", "scan_lines", "split_lines"]

_BOM = b"\xef\xbb\xbf"


class LinesDataset(TextDataset):
    r"""Text by lines. A line ends at byte 10 and nowhere else; what else is in it, NUL bytes as well, is data.

    Samples are bytes, or `str` with an encoding, without the line's end (`\n` or `\r\n`) unless `keep_ends` is set.
    An empty line is a sample. A byte order mark is data, except with the encoding `utf-8-sig`.
    """

    _kind: ClassVar[str] = "lines"
    _unit: ClassVar[str] = "lines"
    _option_types = {"encoding": (str, NoneType), "errors": (str,), "keep_ends": (bool,)}

    @classmethod
    def _scan(cls, path: str, blocks: Iterable[bytes], options: Mapping[str, Any]) -> Iterator[tuple[bytes, Numbers]]:
        return scan_lines(blocks)

    def _parse(self, pieces: Iterable[TextPiece]) -> Iterator[Any]:
        encoding: str | None = self._options.get("encoding")
        for piece in pieces:
            first = piece.at == 0
            for line in split_lines(piece.blocks, keep_ends=bool(self._options.get("keep_ends"))):
                yield line if encoding is None else self._decode(line, encoding, piece, first=first)
                first = False

    def _decode(self, line: bytes, encoding: str, piece: TextPiece, *, first: bool) -> str:
        if encoding.lower().replace("_", "-") == "utf-8-sig":  # the mark stands at the begin of a file only
            line, encoding = line.removeprefix(_BOM) if first else line, "utf-8"
        try:
            return line.decode(encoding, self._options.get("errors", "strict"))
        except UnicodeError as exc:
            raise SourceError(
                f"{quote(piece.path)}: the line {quote(line)} is not {encoding}: {exc}. Read bytes (encoding=None), or "
                f"choose errors='replace' or another encoding"
            ) from exc


def scan_lines(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, Numbers]]:
    """Yield the blocks of a file, and behind which bytes of each lines end."""
    ended = True
    for block in blocks:
        yield block, np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
        ended = block.endswith(b"\n")
    if not ended:
        yield b"", np.zeros(1, np.int64)


def split_lines(blocks: Iterable[bytes], *, keep_ends: bool) -> Iterator[bytes]:
    """Yield the lines of a text.

    Args:
        blocks: the text.
        keep_ends: whether a line's end belongs to the line.
    """
    begun: list[bytes] = []
    for block in blocks:
        lines = block.split(b"\n")
        for line in lines[:-1]:
            if begun:
                line = b"".join([*begun, line])
                begun = []
            yield line + b"\n" if keep_ends else line.removesuffix(b"\r")
        if lines[-1]:
            begun.append(lines[-1])
    if begun:
        yield b"".join(begun)
