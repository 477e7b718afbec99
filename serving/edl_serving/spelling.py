"""Near names for a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for the end of an error message, empty if nothing comes near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
