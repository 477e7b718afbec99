"""A pytest plugin with a real etcd: the fixture `etcd_server`, and `EtcdServer` and `etcd_cluster` for tests' own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.plugins_consul import free_ports
from tests.servers import Server, find_program


class EtcdServer(Server):
    """A member of an etcd cluster on 127.0.0.1.

    Args:
        folder: for its log and data.
        ports: for clients and for other members.
        members: the names and ports of all members of its cluster; None where it is alone.
        options: more options of its command line.
        tls: options of `etcdctl` that speak TLS to it; the server then speaks it, too.
    """

    def __init__(
        self,
        folder: Path,
        ports: Sequence[int] = (),
        members: Sequence[tuple[str, int]] | None = None,
        options: Sequence[str] = (),
        tls: Sequence[str] = (),
    ) -> None:
        self.port, peer_port = ports or free_ports(2)
        self._tls = tls
        scheme = "https" if tls else "http"
        self.client_url = f"{scheme}://127.0.0.1:{self.port}"
        peer_url = f"http://127.0.0.1:{peer_port}"
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in members or ((folder.name, peer_port),))
        command = [
            find_program("etcd", "etcd"),
            *("--name", folder.name, "--data-dir", str(folder / "data"), "--logger", "zap"),
            *("--listen-client-urls", self.client_url, "--advertise-client-urls", self.client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", cluster, "--initial-cluster-token", str(folder.parent)),
            # A lease lasts as long as one and a half elections at least, in whole seconds: here 1 s in place of 2 s.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *options,
        ]
        super().__init__(folder, command)

    @property
    def url(self) -> str:
        """The URL for `open_registry` and `open_store`."""
        return f"{'etcd+https' if self._tls else 'etcd'}://127.0.0.1:{self.port}"

    def is_healthy(self) -> bool:
        """Whether it answers, be it that it wants a user's name."""
        done = self._run("endpoint", "health", "--command-timeout=1s")
        return done.returncode == 0 or "user name is empty" in done.stderr + done.stdout

    def ctl(self, *arguments: str, stdin: str | None = None) -> str:
        """What `etcdctl` answers."""
        done = self._run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [find_program("etcdctl", "etcd"), "--endpoints", self.client_url, *self._tls, *arguments],
            capture_output=True,
            text=True,
            input=stdin,
            timeout=60,
            env={"PATH": os.environ.get("PATH", ""), "ETCDCTL_API": "3"},
        )


@contextlib.contextmanager
def etcd_cluster(folder: Path, count: int = 3) -> Iterator[list[EtcdServer]]:
    """Members of one cluster, which has a leader."""
    ports = free_ports(2 * count)
    members = [(f"m{number}", ports[2 * number + 1]) for number in range(count)]
    servers = [
        EtcdServer(folder / name, ports[2 * number : 2 * number + 2], members)
        for number, (name, _) in enumerate(members)
    ]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="session")
def _shared_etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "alone") as server:
        yield server


@pytest.fixture
def etcd_server(_shared_etcd_server: EtcdServer) -> EtcdServer:
    """A running etcd, the same for all tests: use names of your own. A test may kill and restart it."""
    if not _shared_etcd_server.running:
        _shared_etcd_server.start()
    return _shared_etcd_server
