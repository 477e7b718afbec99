"""Values that options of several commands take. An error names the option as the user typed it, on a single line."""

from __future__ import annotations

import argparse
import math
from typing import Any

from edl.errors import SettingsError

__all__ = ["Once", "Port", "Seconds"]


class Port(argparse.Action):
    """A port to listen on, 0 for a free one."""

    def __call__(self, _parser: object, options: argparse.Namespace, text: Any, option: str | None = None) -> None:
        if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
            raise SettingsError(f"{option} {text}: expected a port from 0 to 65535")
        setattr(options, self.dest, int(text))


class Seconds(argparse.Action):
    """Seconds above 0, and within `least` and `most`."""

    def __init__(self, *args: Any, least: float = 0.0, most: float = math.inf, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._least = least
        self._most = most

    def __call__(self, _parser: object, options: argparse.Namespace, text: Any, option: str | None = None) -> None:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and self._least <= value <= self._most):
            accepted = f"from {self._least:g} to {self._most:.0f}" if self._least else "above 0"
            raise SettingsError(f"{option} {text}: expected seconds {accepted}")
        setattr(options, self.dest, value)


class Once(argparse.Action):
    """An option of which the last would win if it were given twice, and the user would not hear of it.

    Args:
        remedy: What to do instead, for the error.
        same_again: Accept the same value again.
    """

    def __init__(self, *args: Any, remedy: str, same_again: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remedy = remedy
        self._same_again = same_again

    def __call__(self, _parser: object, options: argparse.Namespace, text: Any, option: str | None = None) -> None:
        before = getattr(options, self.dest)
        if before is not None and not (self._same_again and before == text):
            raise SettingsError(f"{option} {text}: {before} was given before; {self._remedy}")
        setattr(options, self.dest, text)
