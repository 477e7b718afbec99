"""Suggestions for a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the end of an error message; empty if no name comes near.

    Args:
        word: the misspelled name.
        known: names to suggest.
    """
    near = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
