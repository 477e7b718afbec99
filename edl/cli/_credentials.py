"""Options for TLS and tokens of commands that ask teachers."""

from __future__ import annotations

import argparse

from edl.errors import SettingsError

__all__ = ["add_credentials"]


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


class _NoToken(argparse.Action):
    """Refuses a token, without repeating it; without this `--token` would be short for `--token-file`."""

    def __call__(self, *_: object) -> None:
        raise SettingsError("--token: expected --token-file with a path: a token on the command line shows in ps")
