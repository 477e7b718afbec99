"""What commands that look at an elastic job share: how it is named, and what is known of it."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from edl.cli._store_option import add_store_option
from edl.collective.goodput.summary import Summary, read_job, summarize
from edl.discovery import Store

__all__ = ["console", "look", "parser"]


def parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Of a command that looks at a job: `job` and `--store`."""
    options = argparse.ArgumentParser(
        prog=f"edl {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("job", help="what `edl run --rdzv-id` named it")
    add_store_option(options)
    return options


def look(store: Store, job: str) -> Summary:
    """Return the job as it is now.

    Raises:
        SettingsError: there is no such job.
        DiscoveryError: the store does not answer.
    """
    return summarize(read_job(store, job), round(time.time() * 1e6))


def console(width: int) -> Console:
    """Return standard output; `width` columns where it is no terminal, which has a width of its own."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)
