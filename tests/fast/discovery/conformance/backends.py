"""The implementations as the conformance tests see them, and what tests do behind EDL's back."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from edl.discovery import Instance, Registry
from edl.discovery.registry import Registration
from edl.discovery.served.listening import ListenAddress
from edl.discovery.served.server import StoreServer
from edl.errors import DiscoveryError
from tests.plugins_consul import ConsulAgent, free_ports
from tests.plugins_etcd import EtcdServer

T = TypeVar("T")


def eventually(condition: Callable[[], T], timeout_s: float = 60.0) -> T:
    """Poll until `condition` holds; the last value, true or not."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def teacher(service: str, name: str = "a", port: int = 9000, **rest: Any) -> Instance:
    """An instance, with what a test does not care about filled in."""
    return Instance(service, name, "127.0.0.1", port, **rest)


def registered(registry: Registry, service: str) -> Registration | None:
    """A registration; None where the registry took longer than its timeout, as on a busy machine."""
    with contextlib.suppress(DiscoveryError):
        return registry.register(teacher(service))
    return None


def count_instances(registry: Registry, service: str) -> int:
    """How many are registered; 0 while the registry's file is removed, or made anew."""
    with contextlib.suppress(DiscoveryError):
        return len(registry.snapshot(service).instances)
    return 0


def remove_database(path: Path) -> None:
    """Remove a SQLite database under its users. The file itself goes last: the next one to look makes it anew."""
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def spoil_database(path: Path) -> None:
    """Put nonsense in the place of a SQLite database, at once: nobody finds nothing there, and makes it anew.

    A link to nonsense elsewhere, since three files cannot be replaced at once: who meets a database without its journal
    removes it, and with the journal beside it even nonsense could be read.
    """
    nonsense = path.with_name("elsewhere") / "nonsense"
    nonsense.parent.mkdir()
    nonsense.write_text("this is not a database, whatever its name says\n" * 100)
    link = path.with_name("link")
    link.symlink_to(nonsense)
    link.replace(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


class Backend(ABC):
    """One implementation, and means to harm it."""

    name: str
    url: str

    @abstractmethod
    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        """Register raw values that EDL would not let through; returns what removes them."""

    @abstractmethod
    def break_it(self) -> None:
        """From now on it cannot be reached."""

    @abstractmethod
    def mend_it(self) -> None:
        """It can be reached again, and has forgotten everything."""


class SqliteBackend(Backend):
    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        text = fields["raw"] if "raw" in fields else json.dumps({"address": "127.0.0.1", "port": 9000, **fields})
        lease = secrets.randbits(62)
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            connection.execute("INSERT INTO lease VALUES (?, 3600, ?)", (lease, time.monotonic() + 3600))
            connection.execute("UPDATE state SET revision = revision + 1")
            revision = connection.execute("SELECT revision FROM state").fetchone()[0]
            connection.execute("INSERT INTO instance VALUES (?, ?, ?, ?, ?)", (lease, service, name, revision, text))

        def remove() -> None:
            with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
                connection.execute("DELETE FROM instance WHERE lease = ?", (lease,))
                connection.execute("UPDATE state SET revision = revision + 1")

        return remove

    def break_it(self) -> None:
        spoil_database(self.path)

    def mend_it(self) -> None:
        self.path.unlink()


class ServedBackend(Backend):
    """A store only: a server in this process, at a port of its own, which it comes back to."""

    name = "served"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = free_ports(1)[0]
        self.url = f"edl://127.0.0.1:{self.port}"
        self._server: StoreServer | None = None
        self.start()

    def start(self) -> None:
        self._server = StoreServer(str(self.path), ListenAddress("127.0.0.1", self.port))

    def stop(self) -> None:
        """End the server; its file stays."""
        if self._server is not None:
            self._server.close()

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        raise NotImplementedError("it is no registry")

    def break_it(self) -> None:
        self.stop()

    def mend_it(self) -> None:
        remove_database(self.path)
        self.start()


class ConsulBackend(Backend):
    name = "consul"

    def __init__(self, agent: ConsulAgent) -> None:
        self.agent = agent
        self.url = agent.url

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        service_id = f"{service}-{name}"
        meta = {key: str(value) for key, value in fields.items() if key not in ("address", "port")}
        body = {
            "Name": service,
            "ID": service_id,
            "Address": fields.get("address", "127.0.0.1"),
            "Port": fields.get("port", 9000) or 0,
            "Meta": {"edl-id": name, **meta},
        }
        self.agent.ask("/v1/agent/service/register", "PUT", body)
        return lambda: self.agent.ask(f"/v1/agent/service/deregister/{service_id}", "PUT")

    def break_it(self) -> None:
        self.agent.kill()

    def mend_it(self) -> None:
        self.agent.forget()
        self.agent.start()


class EtcdBackend(Backend):
    name = "etcd"

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.url = server.url

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> Callable[[], None]:
        text = fields["raw"] if "raw" in fields else json.dumps({"address": "127.0.0.1", "port": 9000, **fields})
        claim = secrets.token_hex(8)
        folder = f"edl/registry/{service}"
        keys = {f"{folder}/records/{claim}/{name}": text, f"{folder}/alive/{claim}": "yes"}
        for key, value in keys.items():
            self.server.ctl("put", key, stdin=value)

        def remove() -> None:
            for key in keys:
                self.server.ctl("del", key)

        return remove

    def break_it(self) -> None:
        self.server.kill()

    def mend_it(self) -> None:
        self.server.forget()
        self.server.start()
