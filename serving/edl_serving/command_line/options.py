"""The option table of a command: the same names as flags and as keys of a TOML file.

An option says how it is written, read and explained; the command line, the file and `--help` are made from the table. A
flag wins over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.errors import SettingsError
from edl.quoting import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OptionGroup", "Option", "add_flags", "read_file", "values"]


@dataclass(frozen=True)
class Option:
    """A setting of a command.

    Attributes:
        name: the flag without its dashes, and the key in a file.
        parse: makes a value of what stands on the command line (text) or in the file (any type of TOML). It raises
            ValueError, saying what is accepted.
        metavar: what `--help` shows for the value.
        help: a line or two.
        many: may be given several times; a list in the file. The result is a tuple.
        pairs: as `many`, with `key=value`; a table in the file. The result is a dictionary.
        negative: can be turned off with `--no-NAME`; takes no value on the command line.
        alias: an older name, which is accepted as well, and is not in `--help`.
        refused: there only to be refused, without its value in the message, which may be a secret; not in `--help`.
    """

    name: str
    parse: Callable[[Any], Any]
    metavar: str
    help: str
    many: bool = False
    pairs: bool = False
    negative: bool = False
    alias: str = ""
    refused: bool = False

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")

    def read(self, raw: Any, where: str) -> Any:
        """Read a value.

        Args:
            raw: as the command line or the file has it.
            where: it was found, for errors.

        Returns:
            What `parse` makes of it, in a tuple or a dictionary for `many` and `pairs`.

        Raises:
            SettingsError: names `where`, the value and what is accepted.
        """
        try:
            if self.pairs:
                return self._read_pairs(raw)
            if self.many:
                if not isinstance(raw, list):
                    raise ValueError("expected a list")
                return tuple(self.parse(item) for item in raw)
            return self.parse(raw)
        except ValueError as exc:
            if self.refused:
                raise SettingsError(f"{where}: {exc}") from None
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
    """Options that belong together in `--help`."""

    title: str
    options: tuple[Option, ...]


def add_flags(parser: argparse.ArgumentParser, groups: Sequence[OptionGroup]) -> None:
    """Add flags for the options of `groups`; a flag that is not given is left out of the namespace.

    Args:
        parser: to add them to.
        groups: of options.
    """
    for group in groups:
        section = parser.add_argument_group(group.title)
        for option in group.options:
            text = argparse.SUPPRESS if option.refused else option.help.replace("%", "%%")
            flag = f"--{option.name}"
            if option.negative:
                section.add_argument(
                    flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text, dest=option.key
                )
            else:
                for name, shown in ((option.name, text), (option.alias, argparse.SUPPRESS)):
                    if name:
                        section.add_argument(
                            f"--{name}",
                            metavar=option.metavar,
                            action="append" if option.many or option.pairs else "store",
                            default=argparse.SUPPRESS,
                            help=shown,
                            dest=option.key,
                        )


def read_file(path: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: of the file; `~` is expanded.

    Returns:
        Its tables.

    Raises:
        SettingsError: no such file, or not TOML; says in which line.
    """
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
    """Read the values that were given; pairs of flags and file are joined, otherwise a flag replaces the file's value.

    Args:
        groups: of options.
        flags: as parsed by `add_flags`.
        file: as read by `read_file`.
        path: of the file, for errors.

    Returns:
        Values by key of their option.

    Raises:
        SettingsError: an unknown key in the file, or a value that its option refuses.
    """
    options = {option.name: option for group in groups for option in group.options}
    known = options | {option.alias: option for option in options.values() if option.alias}
    found: dict[str, Any] = {}
    for key, raw in file.items():
        option = known.get(key) or known.get(key.replace("_", "-"))
        if option is None:
            raise SettingsError(f"{path}: there is no setting {key!r}{did_you_mean(key, options)}")
        found[option.key] = option.read(raw, f"{path}: {key} =")
    for option in options.values():
        if option.key not in flags:
            continue
        value = option.read(flags[option.key], f"--{option.name}")
        found[option.key] = {**found.get(option.key, {}), **value} if option.pairs else value
    return found
