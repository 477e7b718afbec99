"""The argument parser of the commands: errors that suggest, help that keeps its line breaks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from edl.errors import SettingsError
from edl.quoting import did_you_mean
from edl_serving.command_line.options import OptionGroup, add_flags, read_file, values

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Parses a command's arguments; wrong usage is a SettingsError in place of an exit.

    Args:
        command: its name, with positional arguments, for the usage.
        description: printed before the options.
        examples: printed after the options.
    """

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(
            prog=command,
            usage=f"{command} [OPTION ...]",
            description=description,
            epilog=examples,
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def parse_settings(
        self, groups: Sequence[OptionGroup], argv: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add the options of a command, and `--config`; read the command line, and the file that it names.

        Args:
            groups: of options.
            argv: what follows the command's name.

        Returns:
            The values of other arguments that were added, by name, and the values of the options by key.

        Raises:
            SettingsError: an unknown or malformed argument, or a file that cannot be used.
        """
        self.add_argument("--config", metavar="FILE", help="a TOML file with any of the settings below")
        others = [action.dest for action in self._actions if action.dest not in ("help", "config")]
        add_flags(self, groups)
        flags = vars(self.parse(argv))
        path = flags.pop("config", None)
        arguments = {name: flags.pop(name) for name in others}
        return arguments, values(groups, flags, read_file(path) if path else {}, path or "")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments as `parse_args` does.

        Args:
            argv: what follows the command's name.

        Returns:
            What was found.

        Raises:
            SettingsError: an unknown or malformed argument; suggests near names.
        """
        found, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            what = "option" if flag.startswith("-") else "argument"
            raise SettingsError(f"unknown {what} {flag!r}{did_you_mean(flag, known) or '; --help lists all'}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with argparse's message."""
        raise SettingsError(message)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
