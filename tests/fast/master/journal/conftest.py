"""Where journals are kept: what asks for a `place` runs over a file and over a store; tests/services has servers."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from edl.discovery import Store, open_store
from edl.master.journal import Journal, open_journal


class Place(ABC):
    """One journal, and means to harm it."""

    def __init__(self, url: str, store_url: str = "") -> None:
        self.url = url
        self.store_url = store_url
        self._opened = contextlib.ExitStack()
        self.store: Store | None = self._opened.enter_context(open_store(store_url)) if store_url else None

    def open(self, timeout_s: float = 5.0, store: Store | None = None) -> Journal:
        return self._opened.enter_context(open_journal(self.url, store=store or self.store, timeout_s=timeout_s))

    def close(self) -> None:
        self._opened.close()

    @abstractmethod
    def damage(self, what: str) -> None:
        """Change a byte of the third `record` or the `snapshot`; or the second record is `lost`."""


class FilePlace(Place):
    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self.path = path

    def damage(self, what: str) -> None:
        statement = {
            "record": "UPDATE record SET data = X'00' || substr(data, 2) WHERE number = 3",
            "snapshot": "UPDATE state SET snapshot = X'00' || substr(snapshot, 2)",
            "lost": "DELETE FROM record WHERE number = 2",
        }[what]
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            assert connection.execute(statement).rowcount == 1


class StorePlace(Place):
    def __init__(self, store_url: str, job: str) -> None:
        super().__init__(f"store:{job}", store_url)
        self.folder = f"journals/{job}/"

    def damage(self, what: str) -> None:
        folder = self.folder + ("snapshots/" if what == "snapshot" else "records/")
        entry = self.store.list(folder)[-1]
        if what == "lost":
            assert self.store.delete(entry.key.removesuffix("2") + "1")
        else:
            self.store.put(entry.key, entry.value[:-1] + bytes([entry.value[-1] ^ 1]))

    def head(self) -> bytes:
        return self.store.get(f"{self.folder}head").value


def remove_database(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, stack: contextlib.ExitStack, url: str, tmp_path: Path) -> Place:
    is_file = request.param == "file"
    found = FilePlace(tmp_path / "folder" / "journal.sqlite") if is_file else StorePlace(url, "job")
    return stack.enter_context(contextlib.closing(found))
