"""Objects as the API has them: JSON, in camelCase; and the times in them."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple, TypeAlias

Object: TypeAlias = dict[str, Any]
"""An object of the API, or a part of it, as JSON."""


class ObjectList(NamedTuple):
    """Objects that were there at the same moment.

    Attributes:
        resource_version: the moment, from which on a watch can follow.
    """

    items: list[Object]
    resource_version: str


def parse_time(text: str) -> float:
    """Return a time of the API in seconds since 1970.

    Raises:
        ValueError: `text` is none.
    """
    whole, point, rest = text.partition(".")
    fraction = rest.rstrip("Z") if point else ""
    if not text.endswith("Z") or (point and not (fraction.isascii() and fraction.isdigit())):
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        if moment.tzinfo is None:
            raise ValueError(f"{text!r} has no time zone")
        return moment.timestamp()
    moment = datetime.datetime.strptime(whole.rstrip("Z"), "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() + float(f"0.{fraction or 0}")


def format_time(seconds: float) -> str:
    """Return a time as the API takes it: RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
