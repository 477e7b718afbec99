"""Ids of requests and spans, as they come from the network.

An id may be any text, and is cut. A `traceparent` that is invalid by W3C's Trace Context is left out, as it demands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edl.protocol import names

__all__ = ["valid_traceparent", "request_id_of"]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_MOST_ID = 128  # characters; a UUID has 36


def valid_traceparent(text: str | bytes | None) -> str:
    """Return `text` if it is a valid `traceparent`, else an empty text."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def request_id_of(metadata: Mapping[str, str | bytes], otherwise: str) -> str:
    """Return the id of a unary call, of 128 characters at most.

    Args:
        metadata: of the call.
        otherwise: the id if the metadata have none.
    """
    found = metadata.get(names.REQUEST_ID, otherwise)
    return found[:_MOST_ID] if isinstance(found, str) else otherwise[:_MOST_ID]
