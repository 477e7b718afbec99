"""The options of a command, which are read from the command line and a TOML file, checked, and shown by `--help`.

A flag takes precedence over the file, and the file over the default. The functions that read values accept text (from
the command line) or typed values (from TOML), and raise ValueError with a message that says what is accepted.
"""

from __future__ import annotations

import argparse
import json
import math
import pwd
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edl import command_line
from edl.command_line import CommandParser, parse_duration
from edl.errors import SettingsError
from edl.quoting import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZE = re.compile(r"(?P<number>\d+)\s*(?P<unit>B|KiB|MiB|GiB)")
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("expected text")
    return raw.strip()


def flag(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("expected true or false")
    return raw


def log_format(raw: Any) -> str:
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
    return _whole(raw, 1, 2**62, "a whole number above 0")


def port(raw: Any) -> int:
    return _whole(raw, 0, 65535, "a port: 0 (any free one) to 65535")


def user(raw: Any) -> int:
    if isinstance(raw, str) and not raw.strip().isdecimal():
        try:
            return pwd.getpwnam(raw.strip()).pw_uid
        except (KeyError, ValueError):
            raise ValueError("expected a user of this system, by name or number") from None
    return _whole(raw, 0, 2**32 - 2, "a user of this system, by name or number")


def number(raw: Any) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(raw, bool) or not 0 < value < math.inf:
        raise ValueError("expected a number above 0")
    return value


def duration_s(raw: Any) -> float:
    if isinstance(raw, bool) or not (isinstance(raw, str) or raw == 0):
        raise ValueError("expected a duration with a unit, such as 5ms, 2s, 1.5m")
    return parse_duration(str(raw), unit=True)


def size_bytes(raw: Any) -> int:
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError("expected a size with a unit, such as 512MiB")
    return int(match["number"]) * _BYTES[match["unit"]]


def json_or_text(raw: Any) -> Any:
    """Parse text as JSON if possible (`3`, `true`, `[1, 2]`); return other text, and TOML's typed values, unchanged."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


@dataclass(frozen=True)
class Option:
    """A setting of a command.

    Attributes:
        name: The flag without its dashes, which is also the key in a file.
        many: Whether the flag may be repeated (in a file, the value is a list). The result is a tuple.
        pairs: Whether the flag takes `key=value` and may be repeated (in a file, the value is a table). The result is a
            dictionary.
        negative: Whether the flag takes no value and `--no-NAME` turns it off.
        alias: An older name that is also accepted but not shown in `--help`.
    """

    name: str
    parse: Callable[[Any], Any]
    metavar: str
    help: str
    many: bool = False
    pairs: bool = False
    negative: bool = False
    alias: str = ""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    def read(self, raw: Any, where: str) -> Any:
        try:
            if self.pairs:
                return self._read_pairs(raw)
            if self.many:
                if not isinstance(raw, list):
                    raise ValueError("expected a list")
                return tuple(self.parse(item) for item in raw)
            return self.parse(raw)
        except ValueError as exc:
            shown = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
            raise SettingsError(f"{where} {shown!r}: {exc}") from exc

    def _read_pairs(self, raw: Any) -> dict[str, Any]:
        if isinstance(raw, Mapping):
            return {str(key): self.parse(value) for key, value in raw.items()}
        if not isinstance(raw, list):
            raise ValueError("expected a table")
        pairs: dict[str, Any] = {}
        for item in raw:
            key, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
            if not equals or not key.strip():
                raise ValueError("expected key=value")
            pairs[key.strip()] = self.parse(value)
        return pairs


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together in `--help`; if `advanced`, only `--help-all` shows them."""

    title: str
    options: tuple[Option, ...]
    advanced: bool = False


def credential_options(role: Literal["client", "server"], others: str) -> tuple[Option, ...]:
    """Return the options for TLS and tokens that all commands have. See `edl.command_line.credential_options`."""
    found = []
    for name, words in command_line.credential_options(role, others).items():
        flag_ = name == "allow-insecure-tokens"
        metavar = "" if flag_ else "NAME" if name == "tls-server-name" else "FILE"
        found.append(Option(name, flag if flag_ else text, metavar, words, negative=flag_))
    return tuple(found)


def add_flags(parser: CommandParser, groups: Sequence[OptionGroup]) -> None:
    """Add flags for the options of `groups`; the namespace contains only flags that were given."""
    for group in groups:
        section = parser.add_advanced_group(group.title) if group.advanced else parser.add_argument_group(group.title)
        for option in group.options:
            text = option.help.replace("%", "%%")
            how: dict[str, Any] = {"metavar": option.metavar, "action": "store"}
            if option.negative:
                how = {"action": argparse.BooleanOptionalAction}
            elif option.many or option.pairs:
                how["action"] = "append"
            for name, shown in ((option.name, text), (option.alias, argparse.SUPPRESS)):
                if name:
                    section.add_argument(f"--{name}", dest=option.key, default=argparse.SUPPRESS, help=shown, **how)


def read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            return tomllib.load(file)
    except OSError as exc:
        raise SettingsError(f"--config {path!r}: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"--config {path!r} is not TOML: {exc}") from exc


def values(
    groups: Sequence[OptionGroup], flags: Mapping[str, Any], file: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Read the given values. Pairs from the flags and the file are merged; any other flag replaces the file's value."""
    options = {option.name: option for group in groups for option in group.options}
    known = options | {option.alias: option for option in options.values() if option.alias}
    found: dict[str, Any] = {}
    for key, raw in file.items():
        option = known.get(key) or known.get(key.replace("_", "-"))
        if option is None:
            raise SettingsError(f"{path}: unknown setting {key!r}{did_you_mean(key, options)}")
        found[option.key] = option.read(raw, f"{path}: {key} =")
    for option in options.values():
        if option.key not in flags:
            continue
        value = option.read(flags[option.key], f"--{option.name}")
        found[option.key] = {**found.get(option.key, {}), **value} if option.pairs else value
    return found


class ServingParser(CommandParser):
    """Parses the arguments of a command whose settings may also come from a file."""

    def parse_settings(
        self, groups: Sequence[OptionGroup], argv: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of the arguments added earlier, by name, and of `groups` (flags and `--config`), by key."""
        self.add_argument("--config", metavar="FILE", help="a TOML file with any of the settings below")
        others = [action.dest for action in self._actions if action.dest not in ("help", "help_all", "config")]
        add_flags(self, groups)
        flags = vars(self.parse_args(argv))
        path = flags.pop("config", None)
        flags.pop("help_all", None)
        arguments = {name: flags.pop(name) for name in others}
        return arguments, values(groups, flags, read_file(path) if path else {}, path or "")
