"""A pytest plugin with a real Consul agent: the fixture `consul_agent`, and `ConsulAgent` for agents of one's own."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server, find_program


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 with nobody on them, outside the range that the system gives to outgoing connections.

    A restarted agent comes back to its ports, so nobody may take one while it is away.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(20_000, 32_000)  # tests seed the other one, of several workers alike
            try:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    stack.enter_context(socket.socket(socket.AF_INET, kind)).bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
        return ports


class ConsulAgent(Server):
    """A single Consul server on 127.0.0.1.

    Args:
        folder: for its configuration, log and data.
        config: added to its configuration.
        token: for this class's own questions, if the configuration asks for one.
        https: the API speaks TLS (`config` names the certificates); this class then asks nothing over HTTP.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any] | None = None, token: str = "", https: bool = False
    ) -> None:
        super().__init__(folder, [find_program("consul", "consul"), "agent", f"-config-file={folder / 'config.json'}"])
        self._token = token
        self.http_port, self.dns_port, server, lan, wan, own = free_ports(6)
        ports = {"http": self.http_port, "dns": self.dns_port, "server": server, "serf_lan": lan, "serf_wan": wan}
        if https:
            # This class watches the start over plain HTTP on a port of its own.
            ports |= {"https": self.http_port, "http": own}
        self._own_port = ports["http"]
        self.lan_address = f"127.0.0.1:{lan}"
        settings = {
            "server": True,
            "bootstrap_expect": 1,
            "bind_addr": "127.0.0.1",
            "client_addr": "127.0.0.1",
            "data_dir": str(folder / "data"),
            "ports": {**ports, "grpc": -1},
            "performance": {"raft_multiplier": 1},
            "log_level": "info",
            "disable_update_check": True,
            **(config or {}),
        }
        (folder / "config.json").write_text(json.dumps(settings))

    @property
    def url(self) -> str:
        """The URL for `open_registry` and `open_store`."""
        return f"consul://127.0.0.1:{self.http_port}"

    def ask(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """A request to its HTTP API, past EDL."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._own_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-Consul-Token": self._token} if self._token else {},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def is_healthy(self) -> bool:
        try:
            # Sessions can be made as soon as the server knows its own node to be healthy.
            return bool(self.ask("/v1/status/leader")) and any(
                check["CheckID"] == "serfHealth" for check in self.ask("/v1/health/state/passing")
            )
        except (OSError, ValueError):
            return False

    def restart(self, *, forget: bool = False) -> None:
        """SIGKILL and start again, with its data or without."""
        self.kill()
        if forget:
            self.forget()
        self.start()


@pytest.fixture(scope="session")
def _shared_consul_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulAgent]:
    with ConsulAgent(tmp_path_factory.mktemp("consul")) as agent:
        yield agent


@pytest.fixture
def consul_agent(_shared_consul_agent: ConsulAgent) -> ConsulAgent:
    """A running agent, the same for all tests: use names of your own. A test may kill and restart it."""
    if not _shared_consul_agent.running:
        _shared_consul_agent.start()
    return _shared_consul_agent
