"""The implementations as the conformance suite sees them, and what tests do behind EDL's back."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.discovery import Instance, open_store
from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.server import StoreServer
from tests.plugins_consul import ConsulAgent, free_ports
from tests.plugins_etcd import EtcdServer


def teacher(service: str, name: str = "a", port: int = 9000, **rest: Any) -> Instance:
    """An instance, with what a test does not care about filled in."""
    return Instance(service, name, "127.0.0.1", port, **rest)


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

    url: str

    @abstractmethod
    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> None:
        """Register raw values that EDL would not let through."""

    @abstractmethod
    def break_it(self) -> None:
        """From now on it cannot be reached."""

    @abstractmethod
    def mend_it(self) -> None:
        """It can be reached again, and has forgotten everything."""


class SqliteBackend(Backend):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> None:
        _put_instance(self.url, service, name, fields)

    def break_it(self) -> None:
        spoil_database(self.path)

    def mend_it(self) -> None:
        self.path.unlink()


class ServedBackend(Backend):
    """A server in this process, at a port of its own, which it comes back to."""

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

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> None:
        _put_instance(self.url, service, name, fields)

    def break_it(self) -> None:
        self.stop()

    def mend_it(self) -> None:
        remove_database(self.path)
        self.start()


class ConsulBackend(Backend):
    def __init__(self, agent: ConsulAgent) -> None:
        self.server = agent
        self.url = agent.url

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> None:
        meta = {key: str(value) for key, value in fields.items() if key != "port"}
        body = {
            "Name": service,
            "ID": f"{service}-{name}",
            "Address": "127.0.0.1",
            "Port": fields.get("port", 9000) or 0,
            "Meta": {"edl-id": name, **meta},
        }
        self.server.ask("/v1/agent/service/register", "PUT", body)

    def break_it(self) -> None:
        self.server.kill()

    def mend_it(self) -> None:
        self.server.restart(forget=True)


class EtcdBackend(Backend):
    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.url = server.url

    def plant(self, service: str, name: str, fields: Mapping[str, Any]) -> None:
        claim, folder = secrets.token_hex(8), f"edl/store/registry/{service}"
        self.server.ctl("put", f"{folder}/records/{claim}", stdin=_record(name, fields))
        self.server.ctl("put", f"{folder}/alive/{claim}", stdin="yes")

    def break_it(self) -> None:
        self.server.kill()

    def mend_it(self) -> None:
        self.server.forget()
        self.server.start()


def _put_instance(url: str, service: str, name: str, fields: Mapping[str, Any]) -> None:
    claim, folder = secrets.token_hex(8), f"registry/{service}"
    with open_store(url, timeout_s=60.0) as store:
        store.put(f"{folder}/alive/{claim}", b"")
        store.put(f"{folder}/records/{claim}", _record(name, fields).encode())


def _record(name: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"id": name, "address": "127.0.0.1", "port": 9000, **fields})
