"""Where the records of a CSV text end: at newlines that are not quoted."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from edl.errors import SettingsError
from edl.master.datasets.index import Numbers

__all__ = ["BOM", "Dialect", "find_record_ends"]

BOM: Final = b"\xef\xbb\xbf"
_FIELD_LIMIT: Final = 64 << 20
"""Characters of a field. Python's csv module has 131,072, which the text of a document exceeds; without any limit, a
quote that is never closed would have the rest of the file in memory."""


@dataclass(frozen=True)
class Dialect:
    """How records and fields are told apart, as RFC 4180 has it with other characters.

    Attributes:
        delimiter: between fields, an ASCII character.
        quotechar: around fields that hold delimiters, newlines or (doubled) quotes; None: there are none.
    """

    delimiter: str = ","
    quotechar: str | None = '"'

    def __post_init__(self) -> None:
        for name, value in (("delimiter", self.delimiter), ("quotechar", self.quotechar)):
            good = isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n\0"
            if not good and not (name == "quotechar" and value is None):
                raise SettingsError(f"{name}={value!r}: must be an ASCII character")
        if self.delimiter == self.quotechar:
            raise SettingsError(f"delimiter={self.delimiter!r} is the quotechar as well")

    def parse(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Return a reader of records, which raises `csv.Error` where a record is not as it should be.

        Args:
            lines: with their ends; taken as records need them.
        """
        csv.field_size_limit(max(csv.field_size_limit(), _FIELD_LIMIT))  # of the whole process: only ever raised
        named: dict[str, Any] = {"delimiter": self.delimiter, "strict": True}
        if self.quotechar is None:
            return csv.reader(lines, quoting=csv.QUOTE_NONE, **named)
        return csv.reader(lines, quotechar=self.quotechar, **named)


def find_record_ends(data: bytes, dialect: Dialect, *, final: bool) -> tuple[Numbers, int]:
    """Find the records in data that begin with a record. Blank lines are none.

    Args:
        data: as much of the text as is there; lines that are no record's end are looked at again when more is there.
        dialect: of the text.
        final: nothing follows.

    Returns:
        Behind which bytes records end, rising; and behind which byte nothing but a part of a record follows.

    Raises:
        csv.Error: the text breaks the dialect.
    """
    found = _find_by_parity(data, dialect, final=final)
    return _find_by_parsing(data, dialect, final=final) if found is None else found


def _find_by_parity(data: bytes, dialect: Dialect, *, final: bool) -> tuple[Numbers, int] | None:
    """Take newlines behind an even number of quotes. None where quotes or line ends are not where RFC 4180 has them.

    Where every quote opens or closes a field, or doubles another, the csv module finds the same; in an unquoted field,
    say, a quote is data, and parity would be wrong.
    """
    text = np.frombuffer(data, np.uint8)
    newline, back = text == ord("\n"), text == ord("\r")
    if final and data and not data.endswith(b"\n"):
        text = np.append(text, np.uint8(ord("\n")))
        newline, back = np.append(newline, True), np.append(back, False)
    ends = np.flatnonzero(newline)
    quotes = np.flatnonzero(text == ord(dialect.quotechar)) if dialect.quotechar else np.zeros(0, np.int64)
    if len(quotes):
        if not _are_quotes_regular(text, quotes, ord(dialect.delimiter)):
            return None
        before = np.searchsorted(quotes, ends)
        if final and len(quotes) % 2:
            return None  # never closed: parsing says so
        ends = ends[before % 2 == 0]
        backs = np.flatnonzero(back)
        backs = backs[np.searchsorted(quotes, backs) % 2 == 0]
    else:
        backs = np.flatnonzero(back)
    backs = backs[backs + 1 < len(text)]
    if not newline[backs + 1].all():
        return None
    starts = np.append(0, ends[:-1] + 1) if len(ends) else ends
    length = ends - starts
    blank = (length == 0) | ((length == 1) & back[np.minimum(starts, max(len(text) - 1, 0))])
    complete = int(ends[-1]) + 1 if len(ends) else 0
    return np.minimum(ends[~blank] + 1, len(data)), min(complete, len(data))


def _are_quotes_regular(text: Any, quotes: Numbers, delimiter: int) -> bool:
    opening, closing = quotes[::2], quotes[1::2]
    before = text[np.maximum(opening - 1, 0)]
    begins = (opening == 0) | (before == delimiter) | (before == ord("\n"))
    begins[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
    closing = closing[closing + 1 < len(text)]  # what follows the last byte is not there yet
    behind = text[closing + 1]
    ends = (behind == delimiter) | (behind == ord("\n")) | (behind == ord("\r"))
    doubled = np.zeros(len(closing), bool)
    following = opening[1 : len(closing) + 1]
    doubled[: len(following)] = following == closing[: len(following)] + 1
    return bool(begins.all() and (ends | doubled).all())


def _find_by_parsing(data: bytes, dialect: Dialect, *, final: bool) -> tuple[Numbers, int]:
    at = 0
    exhausted = False

    def lines() -> Iterator[str]:
        nonlocal at, exhausted
        while at < len(data):
            end = data.find(b"\n", at) + 1
            if not end and not final:
                break
            line = data[at : end or len(data)]
            at += len(line)
            yield line.decode("latin-1")
        exhausted = True

    ends: list[int] = []
    complete = 0
    reader = dialect.parse(lines())
    for _ in itertools.count():
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error:
            if exhausted and not final:
                break  # more of the record is to come
            raise
        complete = at
        if row:
            ends.append(at)
    return np.array(ends, np.int64), complete
