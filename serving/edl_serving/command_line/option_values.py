"""Readers of option values, from a command line (text) or from TOML (typed).

They return the value and raise ValueError, which says what is accepted.
"""

from __future__ import annotations

import json
import math
import pwd
import re
from typing import Any

__all__ = [
    "count",
    "duration_s",
    "flag",
    "json_or_text",
    "log_format",
    "no_token",
    "number",
    "port",
    "seconds",
    "size_bytes",
    "text",
    "user",
]

_DURATION = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(?P<number>\d+)\s*(?P<unit>B|KiB|MiB|GiB)")
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def text(raw: Any) -> str:
    """Read text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("expected text")
    return raw.strip()


def flag(raw: Any) -> bool:
    """Read true or false."""
    if not isinstance(raw, bool):
        raise ValueError("expected true or false")
    return raw


def log_format(raw: Any) -> str:
    """Read the format of log lines."""
    if raw not in ("text", "json"):
        raise ValueError("expected text or json")
    return str(raw)


def _whole(raw: Any, low: int, high: int, words: str) -> int:
    try:
        value = int(raw) if isinstance(raw, str) else raw
    except ValueError:
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"expected {words}")
    return value


def count(raw: Any) -> int:
    """Read a whole number from 1."""
    return _whole(raw, 1, 2**62, "a whole number above 0")


def port(raw: Any) -> int:
    """Read a TCP port, 0 for a free port."""
    return _whole(raw, 0, 65535, "a port: 0 (any free one) to 65535")


def user(raw: Any) -> int:
    """Read a user id, or the name of a user of this system."""
    if isinstance(raw, str) and not raw.strip().isdecimal():
        try:
            return pwd.getpwnam(raw.strip()).pw_uid
        except (KeyError, ValueError):
            raise ValueError("expected a user of this system, by name or number") from None
    return _whole(raw, 0, 2**32 - 2, "a user of this system, by name or number")


def number(raw: Any) -> float:
    """Read a finite number above 0."""
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(raw, bool) or not 0 < value < math.inf:
        raise ValueError("expected a number above 0")
    return value


def duration_s(raw: Any) -> float:
    """Read seconds; the text carries the unit."""
    match = _DURATION.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        if raw in ("0", 0) and not isinstance(raw, bool):
            return 0.0
        raise ValueError("expected a duration with its unit, as in 5ms, 2s, 1.5m")
    return float(match["number"]) * _SECONDS[match["unit"]]


def seconds(raw: Any) -> float:
    """Read seconds as `duration_s` does; a number without a unit is seconds."""
    try:
        return number(raw)
    except ValueError:
        return duration_s(raw)


def size_bytes(raw: Any) -> int:
    """Read bytes; the text carries the unit."""
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError("expected a size with its unit, as in 512MiB")
    return int(match["number"]) * _BYTES[match["unit"]]


def json_or_text(raw: Any) -> Any:
    """Read JSON where the text is JSON (`3`, `true`, `[1, 2]`), else the text itself; leave what TOML typed."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def no_token(raw: Any) -> str:
    """Refuse any value: a token on a command line is no secret."""
    raise ValueError("expected --token-file with a path: a token on the command line shows in ps")
