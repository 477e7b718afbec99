"""Reads from torchrun's options where nodes meet: `--rdzv-endpoint`, or `--master-addr` and `--master-port`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from edl.discovery.served.addresses import ListenAddress, is_loopback, is_own_host
from edl.discovery.served.store import DEFAULT_PORT
from edl.discovery.store_url import servers_of
from edl.errors import SettingsError

logger = logging.getLogger(__name__)


_ELSEWHERE: Final = ("203.0.113.1", "2001:db8::1")  # in no network (RFC 5737, RFC 3849): routed to other hosts

_SLOW_NAME_S: Final = 2.0  # for a lookup; a resolver that does not answer takes 5 s, a busy machine up to this


def own_address(store_url: str) -> str:
    """Find this node's address on the route to the store. If it is a loopback address, use a route to other hosts."""
    servers = servers_of(store_url)
    if not servers:
        return "127.0.0.1"  # a store in a file: all nodes are on this machine
    if store_url.startswith("edl:") and is_loopback(servers[0][0]):
        return "127.0.0.1"  # one agent serves it: the others are on its machine
    for number, (host, port) in enumerate(servers, 1):
        try:
            address = _towards(host, port or 1)
            break
        except OSError as exc:
            if number == len(servers):
                what = f"no route to the store's host {host}: {exc}"
                raise SettingsError(f"{what}; pass the address where others reach this node as --local-addr") from exc
    if ipaddress.ip_address(address).is_loopback:
        for elsewhere in _ELSEWHERE:
            with contextlib.suppress(OSError):
                return _towards(elsewhere, 1)
    return address


def warn_of_slow_name(address: str) -> None:
    """Warn if looking up the name of an address is slow, because torch does that for every connection."""
    mapped = address if ":" in address else f"::ffff:{address}"  # the form that torch looks up
    began = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((mapped, 0, 0, 0), 0)
    took_s = time.monotonic() - began
    if took_s >= _SLOW_NAME_S:
        logger.warning(
            "DNS took %.1f s for the name of %s, which torch looks up for each connection: restarts take that much "
            'longer. Add the line "%s %s" to /etc/hosts on every node',
            *(took_s, mapped, mapped, socket.gethostname()),
            extra={"seconds": took_s},
        )


def _towards(host: str, port: int) -> str:
    """Return this node's address on the route to a host. IPv4 is preferred: peers are more likely to reach it."""
    ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    failure: OSError | None = None
    for family, kind, protocol, _, address in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket sends nothing here
                return str(probe.getsockname()[0])
        except OSError as exc:
            failure = exc
    assert failure is not None  # a name without addresses fails earlier
    try:
        raise failure
    finally:
        failure = None  # its traceback holds this frame


_MASTER_PORT = 29500  # torchrun's default
_MASTER_ADDR = "127.0.0.1"
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A host and port, the same in all nodes' options; the agent on that host serves the store."""

    host: str
    port: int
    is_host: bool | None = None  # whether this is that host, if the user says so (`is_host=1`, as for torch's c10d)

    @classmethod
    def of(cls, options: argparse.Namespace, conf: Mapping[str, str], max_nodes: int) -> RendezvousEndpoint | None:
        """Read torchrun's options. Returns None if the job has one node, no endpoint is given, or a store is given."""
        backend = options.rdzv_backend.strip().lower()
        if options.standalone or options.store or max_nodes < 2 or "://" in options.rdzv_endpoint:
            return None
        if backend.startswith("etcd"):
            return None
        if options.rdzv_endpoint:
            given, text, default = "--rdzv-endpoint", options.rdzv_endpoint, DEFAULT_PORT
        elif backend == "static" and (options.master_addr != _MASTER_ADDR or options.master_port is not None):
            port = _MASTER_PORT if options.master_port is None else options.master_port
            addr = options.master_addr
            bare = ":" in addr and not addr.startswith("[")
            given, text, default = "--master-addr", f"[{addr}]:{port}" if bare else f"{addr}:{port}", port
        else:
            return None
        if text.count(":") > 1 and not text.startswith("["):
            raise SettingsError(f"{given} {text}: an IPv6 address goes in brackets, such as [fd00::2]:{DEFAULT_PORT}")
        try:
            host, port = parse_rendezvous_endpoint(text, default)
        except ValueError as exc:
            raise SettingsError(f"{given} {text}: expected HOST or HOST:PORT, such as node0:{DEFAULT_PORT}") from exc
        if port == 0:
            raise SettingsError(f"{given} {text}: other nodes cannot know the port: name one, such as {DEFAULT_PORT}")
        return cls(host, port, _is_host(conf))

    @property
    def url(self) -> str:
        return f"edl://[{self.host}]:{self.port}" if ":" in self.host else f"edl://{self.host}:{self.port}"

    @property
    def own(self) -> bool:
        return is_own_host(self.host) if self.is_host is None else self.is_host

    @property
    def local(self) -> bool:
        return is_loopback(self.host)

    @property
    def listen(self) -> ListenAddress:
        """Where the host listens: unless `local`, on all addresses, since it may know itself by a loopback address."""
        if not self.local:
            return ListenAddress("::", self.port)
        return ListenAddress("127.0.0.1" if self.host == "localhost" else self.host, self.port)


def _is_host(conf: Mapping[str, str]) -> bool | None:
    value = conf.get("is_host")
    if value is None:
        return None
    if value.lower() not in (*_TRUE, *_FALSE):
        raise SettingsError(f"--rdzv-conf is_host={value}: expected 1 or 0")
    return value.lower() in _TRUE
