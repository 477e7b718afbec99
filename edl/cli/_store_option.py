"""The option that says where teachers and jobs meet, the same for all commands."""

from __future__ import annotations

import argparse

from edl.cli._option_values import Once

__all__ = ["STORE_URLS", "add_store_option"]

STORE_URLS = "sqlite:///path, edl://host:port, consul://host:port or etcd://host:port"


def add_store_option(parser: argparse.ArgumentParser, meaning: str = "", *, alias: bool = False) -> None:
    """Add `--store`.

    Args:
        parser: of the command.
        meaning: what the command looks for there, for `--help`.
        alias: accept `--discovery` as well, as the command did when this was its name.
    """
    names = ("--store", "--discovery") if alias else ("--store",)
    what = f"{meaning}: {STORE_URLS}" if meaning else STORE_URLS
    parser.add_argument(
        *names,
        dest="store",
        metavar="URL",
        action=Once,
        same_again=True,
        remedy="a command uses one store",
        help=f"{what} (default: EDL_DISCOVERY, or your file)",
    )
