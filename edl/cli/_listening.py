"""Where commands that may become a master listen, and whom they let in."""

from __future__ import annotations

import logging

from edl.discovery.served.own_host import is_loopback
from edl.settings import Credentials

__all__ = ["default_host", "warn_of_open_port"]

logger = logging.getLogger(__name__)


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
