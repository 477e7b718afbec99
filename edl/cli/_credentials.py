"""Options for TLS and tokens of commands, and whom they let in where they listen themselves."""

from __future__ import annotations

import argparse
import logging

from edl.discovery.served.addresses import is_loopback
from edl.errors import SettingsError
from edl.settings import Credentials

__all__ = ["add_credentials", "add_server_credentials", "default_host", "warn_of_open_port"]

logger = logging.getLogger(__name__)


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Add the options of which `Credentials.of_options` takes the values."""
    add = parser.add_argument_group(
        "TLS and tokens (docs/security.md); files are read again when they change"
    ).add_argument
    add("--tls-ca", metavar="FILE", help="speak TLS, with teachers of these CAs; or system (EDL_TLS_CA)")
    add("--tls-server-name", metavar="NAME", help="that certificates must hold, not the host (EDL_TLS_SERVER_NAME)")
    add("--tls-cert", metavar="FILE", help="certificate to show to teachers: mutual TLS (EDL_TLS_CERT)")
    add("--tls-key", metavar="FILE", help="its private key, PEM, readable by owner and group only (EDL_TLS_KEY)")
    add("--token-file", metavar="FILE", help="send the first token of this file to teachers (EDL_TOKEN_FILE)")
    add(
        "--allow-insecure-tokens",
        action="store_true",
        default=None,
        help="send it without TLS beyond this host, too (EDL_ALLOW_INSECURE_TOKENS)",
    )
    add("--token", action=_NoToken, help=argparse.SUPPRESS)


def add_server_credentials(parser: argparse.ArgumentParser, clients: str, more: str = "") -> None:
    """Add the options for TLS and tokens of a command that listens.

    Args:
        parser: Parser of the command.
        clients: Word for those that connect, such as "browsers".
        more: Further sentences for the heading of the group.
    """
    add = parser.add_argument_group(
        f"TLS and tokens (docs/security.md); files are read again when they change{more}"
    ).add_argument
    add("--token-file", metavar="FILE", help="require a token: any line of this file, 16 characters or more")
    add("--tls-cert", metavar="FILE", help="certificate of this server, PEM")
    add("--tls-key", metavar="FILE", help="its private key, PEM, readable by owner and group only")
    add("--tls-ca", metavar="FILE", help=f"accept only {clients} with a certificate of these CAs")
    add(
        "--allow-insecure-tokens",
        action="store_true",
        default=None,
        help="accept tokens without TLS from other hosts, for example behind a proxy that speaks TLS",
    )


def default_host(store_url: str) -> str:
    """Return where to listen unless that is said: for this host only where the store is a file, which no other has.

    Else at all addresses, IPv6 and IPv4: whichever of the processes on many hosts leads, the others must reach it.

    Args:
        store_url: of the job.
    """
    return "127.0.0.1" if store_url.startswith("sqlite:") else "::"


def warn_of_open_port(host: str, credentials: Credentials) -> None:
    """Log a warning where other hosts reach a master that asks them for nothing.

    Args:
        host: where it listens.
        credentials: that it serves with.
    """
    mutual_tls = credentials.cert is not None and credentials.ca is not None
    if is_loopback(host) or credentials.token_file is not None or mutual_tls:
        return
    logger.warning(
        "the master listens on %s without a token: who reaches its port takes the job's shards and reports them; set "
        "--token-file, or --host ADDRESS (docs/security.md)",
        host,
    )


class _NoToken(argparse.Action):
    """Refuses a token, without repeating it; without this `--token` would be short for `--token-file`."""

    def __call__(self, *_: object) -> None:
        raise SettingsError("--token: expected --token-file with a path: a token on the command line shows in ps")
