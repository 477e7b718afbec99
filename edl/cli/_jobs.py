"""The command line and the console of `edl status` and `edl report`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from edl.cli._store_option import add_store_option

__all__ = ["console", "parser"]


def parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments `job` and `--store`."""
    options = argparse.ArgumentParser(
        prog=f"edl {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("job", help="what `edl run --rdzv-id` named it")
    add_store_option(options)
    return options


def console(width: int) -> Console:
    """Return standard output, `width` columns wide unless it is a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)
