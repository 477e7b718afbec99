"""Objects of the API as JSON, in camelCase, with times, and with quantities such as `500m`, `1.5Gi` and `2e3`.

The notation of quantities: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import datetime
import re
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final, NamedTuple, TypeAlias

Object: TypeAlias = dict[str, Any]
"""An object of the API, or part of one, as JSON."""


_TIME: Final = re.compile(r"([0-9-]{10}T[0-9:]{8})(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})", re.ASCII)


class ObjectList(NamedTuple):
    """Objects that existed at the same moment; a watch can continue from that moment's `resource_version`."""

    items: list[Object]
    resource_version: str


def parse_time(text: str) -> float:
    """Return an API time in seconds since 1970; ValueError if `text` is not a time with a time zone."""
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


_PATTERN: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII)
_FACTORS: Final = {
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
}
_MOST_CHARS: Final = 64  # the server's own have about twenty


def parse_quantity(text: str | int | float) -> Decimal:
    """Return an amount in units (cores, bytes, devices); ValueError if `text` is not a quantity."""
    written = str(text).strip() if not isinstance(text, bool) else ""
    match = _PATTERN.fullmatch(written) if len(written) <= _MOST_CHARS else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity like 500m, 2 or 1.5Gi")
    number, suffix, exponent = match.groups()
    if suffix:
        return Decimal(number) * _FACTORS[suffix]
    return Decimal(number).scaleb(int(exponent or 0))


def format_bytes(amount: Decimal) -> str:
    """Return an amount of memory, rounded up to whole bytes, with the largest suffix that needs no fraction."""
    whole = int(amount.to_integral_value(ROUND_CEILING))
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        if whole and whole % int(_FACTORS[suffix]) == 0:
            return f"{whole // int(_FACTORS[suffix])}{suffix}"
    return str(whole)
