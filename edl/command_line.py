"""Shared options and value types of EDL's commands.

`CommandParser` is argparse's parser with four differences. Wrong usage raises `SettingsError`, which `edl` prints on
one line. The error for an unknown option suggests the nearest known option. Options cannot be abbreviated, since a new
option could change what an abbreviation means. `--help` shows the most used options and fits on a screen; `--help-all`
adds the groups made by `add_advanced_group`.

This module declares the options that several commands share (the store, TLS and tokens, the log) and the types of
option values, such as durations and ports. Every command imports this module, so it imports nothing slow.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

from edl.errors import SettingsError
from edl.quoting import did_you_mean, quote

STORE_URLS: Final = "sqlite:///path, edl://host:port, consul://host:port or etcd://host:port"
_DURATION: Final = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>us|ms|s|m|min|h)")
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TLS_TITLE: Final = "TLS and tokens (docs/security.md); files are reread on change"


class CommandParser(argparse.ArgumentParser):
    """Parses arguments of `command` ("edl label"); `--help` ends with `examples`, `--help-all` also with `details`."""

    def __init__(self, command: str, description: str, examples: str = "", details: str = "") -> None:
        super().__init__(
            prog=command,
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28),
            allow_abbrev=False,
            add_help=False,
        )
        self._examples = examples
        self._details = details
        self._advanced: list[object] = []
        self._given: list[str] = []
        self.add_argument("-h", "--help", action="help", help="show this help; --help-all shows all options")
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=argparse.SUPPRESS)

    def add_advanced_group(self, title: str) -> argparse._ArgumentGroup:
        """Add a group of options that only `--help-all` shows."""
        group = self.add_argument_group(title)
        self._advanced.append(group)
        return group

    def add_store_option(self, meaning: str = "") -> None:
        """Add `--store`, with the alias `--discovery`. `meaning`, for the help, says what the store is used for."""
        self.add_argument(
            "--store",
            "--discovery",
            dest="store",
            metavar="URL",
            action=Once,
            same_again=True,
            remedy="a command uses one store",
            help=f"{meaning}{': ' if meaning else ''}{STORE_URLS} (default: EDL_DISCOVERY, else your SQLite file)",
        )

    def add_credentials(self, role: Literal["client", "server"], others: str, more: str = "") -> None:
        """Add the options that `Credentials.of_options` reads. See `credential_options`."""
        add = self.add_advanced_group(_TLS_TITLE + more).add_argument
        for name, text in credential_options(role, others).items():
            flag = name == "allow-insecure-tokens"
            metavar = "NAME" if name == "tls-server-name" else "FILE"
            how: dict[str, Any] = {"action": "store_true", "default": None} if flag else {"metavar": metavar}
            add(f"--{name}", help=text, **how)

    def add_log_options(self) -> None:
        """Add `--log-format` and `--verbose`."""
        add = self.add_advanced_group("log").add_argument
        add("--log-format", choices=("text", "json"), default="text", help="format on standard error (default: text)")
        add("--verbose", action="store_true", help="also log debug lines")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does; SettingsError if an argument is unknown, missing or wrong."""
        self._given = list(args or ())
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            what = "option" if unknown[0].startswith("-") else "argument"
            name = unknown[0].partition("=")[0]  # what follows may be a secret
            hint = self._hint(name) if what == "option" else ""
            raise SettingsError(f"unknown {what} {name!r}{hint or '; --help-all lists all options'}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with argparse's message, or with the option that was probably meant."""
        for word in self._given:
            name = word.partition("=")[0]
            if word == "--" or (self._has_script() and not word.startswith("-")):
                break  # what follows the script is the script's own
            if name.startswith("--") and name not in self._option_string_actions and (hint := self._hint(name)):
                raise SettingsError(f"unknown option {name!r}{hint}")
        raise SettingsError(re.sub(r"^argument ([^:\s]+): ", lambda found: f"{self._typed_name(found[1])} ", message))

    def _typed_name(self, names: str) -> str:
        """Return which of an option's slash-separated names the user typed; if none, the first long name."""
        parts, given = names.split("/"), {word.partition("=")[0] for word in self._given}
        typed = [part for part in parts if part in given] + [part for part in parts if part.startswith("--")]
        return typed[0] if typed else names

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among an option's choices, as argparse does, and suggest the nearest choice."""
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            known = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{quote(value)}: expected {known}{hint}")

    def format_help(self) -> str:
        """Return the help without advanced groups."""
        return self._format(everything=False)

    def _format(self, *, everything: bool) -> str:
        positionals = [
            " ".join(self._get_formatter()._format_args(action, action.metavar or action.dest).split())  # type: ignore[arg-type]
            for action in self._positionals._group_actions
        ]
        self.usage = self.usage or " ".join([self.prog, *positionals, "[OPTION ...]"]).replace("%", "%%")
        more = f"`{self.prog} --help-all` shows more options." if self._advanced else ""
        parts = [self._examples, self._details if everything else more]
        self.epilog = "\n\n".join(filter(None, parts))
        groups = self._action_groups
        try:
            if not everything:
                self._action_groups = [group for group in groups if group not in self._advanced]
            return super().format_help()
        finally:
            self._action_groups = groups

    def _hint(self, name: str) -> str:
        return did_you_mean(name, self._names())

    def _names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]

    def _has_script(self) -> bool:
        return any(action.nargs == argparse.REMAINDER for action in self._actions)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser._format(everything=True), end="")  # noqa: T201 - as argparse prints --help
        parser.exit()


class Once(argparse.Action):
    """Refuses a second value (with `same_again`, only a different one), unlike argparse. `remedy` ends the error."""

    def __init__(self, *args: Any, remedy: str, same_again: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remedy = remedy
        self._same_again = same_again

    def __call__(self, _parser: object, options: argparse.Namespace, text: Any, option: str | None = None) -> None:
        """Set the value; SettingsError for a second value, unless it is the same and `same_again` allows this."""
        before = getattr(options, self.dest)
        if before not in (None, self.default) and not (self._same_again and before == text):
            raise SettingsError(f"{option} {text}: {before} was already given; {self._remedy}")
        setattr(options, self.dest, text)


def credential_options(role: Literal["client", "server"], others: str) -> dict[str, str]:
    """Return the options for TLS and tokens, by name, with their help; `others` names the peers, such as "teachers"."""
    if role == "client":
        return {
            "tls-ca": f"use TLS; CAs to trust for {others}, or system (EDL_TLS_CA)",
            "tls-server-name": "name to expect in certificates instead of the host (EDL_TLS_SERVER_NAME)",
            "tls-cert": f"certificate to present to {others}: mutual TLS (EDL_TLS_CERT)",
            "tls-key": "the certificate's private key, PEM, readable by owner and group only (EDL_TLS_KEY)",
            "token-file": f"send the first token of this file to {others} (EDL_TOKEN_FILE)",
            "allow-insecure-tokens": "send tokens without TLS beyond this host (EDL_ALLOW_INSECURE_TOKENS)",
        }
    return {
        "tls-cert": f"this server's certificate, PEM; {others} connect over TLS",
        "tls-key": "the certificate's private key, PEM, readable by owner and group only",
        "tls-ca": f"mutual TLS: accept only {others} with a certificate from these CAs",
        "token-file": f"accept only {others} with a token from this file: one per line, 16 characters or more",
        "allow-insecure-tokens": "accept tokens without TLS from other hosts, for example behind a proxy with TLS",
    }


def parse_duration(text: str, *, unit: bool = False) -> float:
    """Return a duration such as `5ms`, `3s`, `2m` or `1h` in seconds; ValueError for any other text.

    A number without a unit counts as seconds. If a `unit` is required, only 0 may have none.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is not None:
        return float(match["number"]) * _SECONDS[match["unit"]]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf or (unit and text.strip() != "0"):
        raise ValueError("expected a duration with a unit, such as 5ms, 2s, 1.5m")
    return seconds


def duration(least_s: float = 0.0, most_s: float = math.inf, *, zero: bool = False) -> Callable[[str], float]:
    """Return an option type: a duration in seconds within these bounds, above 0 unless `zero` allows 0."""

    def parse(text: str) -> float:
        try:
            value = parse_duration(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text}: {exc}") from exc
        if not (least_s <= value <= most_s and (value > 0 or zero)):
            least = f"from {least_s:g}s" if least_s or zero else "above 0"
            most = "" if most_s == math.inf else f" to {most_s:.0f}s"
            raise argparse.ArgumentTypeError(f"{text}: expected a duration {least}{most}")
        return value

    return parse


def port(text: str) -> int:
    """Return a port to listen on; 0 means any free port."""
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text}: expected a port from 0 to 65535")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return an option type: a whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}")
        return value

    return parse


def split_names(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]
