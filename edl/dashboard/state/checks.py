"""Fields of JSON records that others wrote: each is of its type and bounded, or None.

What does not belong here: which fields a record has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from edl.errors import ProtocolError

__all__ = ["decode_object", "number", "rows", "text", "texts", "whole"]

_MAX_TEXT: Final = 500
"""Characters of a text: a reason in a sentence or two fits; a page of a stranger's text does not."""
_MAX_WHOLE: Final = 2**53
"""Beyond it JavaScript's numbers skip some."""
_MAX_ITEMS: Final = 1000
"""Of a list, such as the students of a teacher: a page with more of them helps no reader."""


def decode_object(data: bytes) -> Mapping[str, Any]:
    """Read a JSON object.

    Args:
        data: JSON.

    Raises:
        ProtocolError: the bytes are something else.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ProtocolError(f"a JSON object is expected, not {type(found).__name__}")
    return found


def text(value: Any, limit: int = _MAX_TEXT) -> str:
    """Return text, clipped; empty for anything else.

    Args:
        value: of a record.
        limit: the most characters.
    """
    if not isinstance(value, str):
        return ""
    return value[:limit].encode(errors="replace").decode()  # half a surrogate pair is no text that can be sent


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else.

    Args:
        value: of a record.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # an int of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Return a whole number from 0 that JavaScript can hold; None for anything else.

    Args:
        value: of a record.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_WHOLE:
        return None
    return value


def rows(value: Any, limit: int = _MAX_ITEMS) -> list[Mapping[str, Any]]:
    """Return the objects in a list, the first ones; an empty list for anything else.

    Args:
        value: of a record.
        limit: the most objects.
    """
    if not isinstance(value, list):
        return []
    return [item for item in value[:limit] if isinstance(item, dict)]


def texts(value: Any, limit: int = _MAX_ITEMS) -> tuple[str, ...]:
    """Return the texts in a list, the first ones; nothing for anything else.

    Args:
        value: of a record.
        limit: the most texts.
    """
    if not isinstance(value, list):
        return ()
    return tuple(text(item) for item in value[:limit] if isinstance(item, str))
