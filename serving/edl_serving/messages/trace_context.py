"""What a request is known by: the id that its student logs, and the span that it is part of.

Both come from the network: an id may be any text, and is cut; a `traceparent` that is none, by W3C's Trace Context, is
left out, as that wants it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edl.protocol import names

__all__ = ["checked_traceparent", "request_id_of"]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_MOST_ID = 128  # characters; a UUID has 36


def checked_traceparent(text: str | bytes | None) -> str:
    """`text` if it is a valid `traceparent`, else nothing."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def request_id_of(metadata: Mapping[str, str | bytes], otherwise: str) -> str:
    """The id of a call of its own."""
    found = metadata.get(names.REQUEST_ID, otherwise)
    return found[:_MOST_ID] if isinstance(found, str) else otherwise[:_MOST_ID]
