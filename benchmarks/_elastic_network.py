"""Hosts on one machine, each a network namespace on a bridge, so that all packets of a host can be dropped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence

__all__ = ["Network"]

_SUBNET = "10.231.0"
"""A subnet of a private range (RFC 1918)."""


class Network:
    """Some hosts, and the bridge's own address, on which servers for all hosts can listen.

    Args:
        hosts: Number of hosts.

    Raises:
        OSError: Namespaces cannot be made, which requires root and iproute2.
    """

    def __init__(self, hosts: int) -> None:
        self.address = f"{_SUBNET}.1"
        self._bridge = f"edl{os.getpid()}"
        self.hosts = hosts
        if shutil.which("ip") is None:
            raise OSError("the program `ip` is missing (Debian's package iproute2)")
        try:
            self._ip("link", "add", self._bridge, "type", "bridge")
            self._ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            self._ip("link", "set", self._bridge, "up")
            for number in range(hosts):
                self._add(number)
        except BaseException:
            self.close()
            raise

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, whose only interface is eth0."""
        return ["ip", "netns", "exec", self._name(number), *command]

    def cut(self, number: int) -> None:
        """Silently drop all packets from and to a host."""
        self._ip("link", "set", self._port(number), "down")

    def close(self) -> None:
        """Remove all hosts and the bridge. End the processes on the hosts first."""
        for number in range(self.hosts):
            # The kernel removes a namespace some time after it was deleted. Until then, its link keeps its name, which
            # the next network in this process could not use.
            with contextlib.suppress(OSError):
                self._ip("link", "delete", self._port(number))
            with contextlib.suppress(OSError):
                self._ip("netns", "delete", self._name(number))
        with contextlib.suppress(OSError):
            self._ip("link", "delete", self._bridge)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, number: int) -> None:
        name, port = self._name(number), self._port(number)
        self._ip("netns", "add", name)
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", port, "master", self._bridge, "up")
        self._ip("-netns", name, "address", "add", f"{_SUBNET}.{10 + number}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            self._ip("-netns", name, "link", "set", interface, "up")

    def _name(self, number: int) -> str:
        return f"{self._bridge}-{number}"

    def _port(self, number: int) -> str:
        return f"{self._bridge}p{number}"

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise OSError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
