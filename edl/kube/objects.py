"""Objects of the API as JSON, in camelCase, and the times in them."""

from __future__ import annotations

import datetime
import re
from typing import Any, Final, NamedTuple, TypeAlias

Object: TypeAlias = dict[str, Any]
"""An object of the API, or part of one, as JSON."""


_TIME: Final = re.compile(r"([0-9-]{10}T[0-9:]{8})(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})", re.ASCII)


class ObjectList(NamedTuple):
    """Objects that existed at the same moment, `resource_version`, from which a watch can follow."""

    items: list[Object]
    resource_version: str


def parse_time(text: str) -> float:
    """Return a time of the API in seconds since 1970; ValueError if `text` is not a time with a zone."""
    # Python 3.10 parses neither `Z` nor fractions other than three or six digits.
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time with a time zone")
    moment, fraction, zone = match.groups()
    return datetime.datetime.fromisoformat(moment + zone.replace("Z", "+00:00")).timestamp() + float(fraction or 0)


def read_time(value: object) -> float | None:
    """Return the Unix time in a field; None if it is missing or not a time."""
    try:
        return parse_time(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def format_time(seconds: float) -> str:
    """Return a time in the API's format: RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
