"""Where other nodes reach this one."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from edl.errors import SettingsError

__all__ = ["own_address"]


def own_address(store_url: str) -> str:
    """This node's own address on the way to the store, which all nodes can reach.

    Args:
        store_url: as `edl.discovery.open_store` takes it.

    Raises:
        SettingsError: there is no way to the store's host.
    """
    parts = urlsplit(store_url)
    if not parts.hostname:
        return "127.0.0.1"  # a store in a file: all nodes are on this machine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 1))  # of a datagram socket: sends nothing
        except OSError as exc:
            what = f"no way to the store's host {parts.hostname}: {exc}"
            raise SettingsError(f"{what}; --local-addr ADDRESS says where others reach this node") from exc
        return str(probe.getsockname()[0])
