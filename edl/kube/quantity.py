"""Parses and formats amounts of resources, such as `500m`, `1.5Gi` and `2e3`.

The notation: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

_PATTERN: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII)
_FACTORS: Final = {
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
}
_MOST_CHARS: Final = 64  # the server's own have about twenty


def parse_quantity(text: str | int | float) -> Decimal:
    """Return an amount in units (cores, bytes, devices); ValueError if `text` is not one."""
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
