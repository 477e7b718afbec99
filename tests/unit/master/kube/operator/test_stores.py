"""What stores say of resources: kept while they are away, told when it changes, each store opened once."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.discovery import open_store
from edl.discovery.served.listening import ListenAddress
from edl.discovery.served.server import StoreServer
from edl.load_reporting.wanted import wanted_key
from edl.master.kube.operator.stores import StoreDirectory
from edl.master.kube.operator.stores.progress import ProgressReader, count_done
from edl.master.naming import report_key


def wanted(count: int, **fields: Any) -> bytes:
    record = {"v": 1, "count": count, "now": 0, "since": 1.0, "time": time.time(), "reason": "r", "decisions": []}
    return json.dumps({**record, **fields}).encode()


def report(**dataset: Any) -> bytes:
    return json.dumps({"datasets": [{"name": "d", "units": 100, "epochs": 2, **dataset}]}).encode()


def wait_for(condition: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def directory(told: list[str]) -> Iterator[StoreDirectory]:
    found = StoreDirectory(told.append)
    yield found
    found.close()


def test_wanted_and_progress(directory: StoreDirectory, told: list[str], tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.sqlite"
    with open_store(url) as store:
        first = directory.ask("a", url, "workers", "job-1")
        assert first.wanted is None
        assert first.stale or first.progress is None
        wait_for(lambda: told, "the first answer")
        assert directory.ask("a", url, "workers", "job-1").stale == ""
        told.clear()
        store.put(wanted_key("workers", "job-1"), wanted(5))
        wait_for(lambda: told == ["a"], "the change")
        assert directory.ask("a", url, "workers", "job-1").wanted == 5
        store.put(wanted_key("workers", "job-1"), wanted(5, reason="the same"))
        store.put(wanted_key("workers", "another"), wanted(7))
        store.put(report_key("job-1"), report(units_done=50))
        wait_for(lambda: directory.ask("a", url, "workers", "job-1").progress is not None, "the progress")
        progress = directory.ask("a", url, "workers", "job-1").progress
        assert progress is not None
        assert progress.percentage == 25
        assert told in (["a"], ["a", "a"]), "told of what is another's, or says nothing new"
        store.delete(wanted_key("workers", "job-1"))
        wait_for(lambda: directory.ask("a", url, "workers", "job-1").wanted is None, "the removal")


def test_store_away_keeps_what_was_wanted(directory: StoreDirectory, told: list[str], tmp_path: Path) -> None:
    port = free_port()
    server = StoreServer(str(tmp_path / "served.sqlite"), ListenAddress("127.0.0.1", port))
    url = f"edl://127.0.0.1:{port}"
    with contextlib.closing(server), open_store(url) as store:
        store.put(wanted_key("teachers", "digits"), wanted(3))
        wait_for(lambda: directory.ask("p", url, "teachers", "digits").wanted == 3, "what is wanted")
    wait_for(lambda: directory.ask("p", url, "teachers", "digits").stale, "the loss")
    assert directory.ask("p", url, "teachers", "digits").wanted == 3


def test_bad_store_is_no_answer(directory: StoreDirectory) -> None:
    answer = directory.ask("a", "gopher://x", "workers", "j")
    assert answer.wanted is None
    assert "gopher" in answer.stale


def test_store_is_opened_once(directory: StoreDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_counted(url: str) -> Any:
        opened.append(url)
        return open_store(url)

    monkeypatch.setattr("edl.master.kube.operator.stores.follower.open_store", open_counted)
    url = f"sqlite://{tmp_path}/store.sqlite"
    for number in range(20):
        directory.ask(f"job-{number}", url, "workers", f"j-{number}")
    assert opened == [url]
    for number in range(20):
        directory.forget(f"job-{number}")
    directory.ask("job-0", url, "workers", "j-0")
    assert opened == [url, url], "it was not closed with the last resource"


def test_advisor_runs_for_auto_pools(directory: StoreDirectory, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.sqlite"
    directory.ask("p", url, "teachers", "digits", advised=True)
    with open_store(url) as store:
        wait_for(lambda: store.get("elections/advisor"), "the advisor")
        directory.ask("p", url, "teachers", "digits", advised=False)
        wait_for(lambda: store.get("elections/advisor") is None, "the advisor's end")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["datasets", "units", "epochs", "units_done", "finished", "name"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_report_is_read(found: Any) -> None:
    reader = ProgressReader()
    for now_s in (1.0, 2.0):
        progress = reader.read(json.dumps(found).encode(), now_s)
        if progress is not None and progress.percentage is not None:
            assert 0 <= progress.percentage <= 100
        if progress is not None and progress.remaining_s is not None:
            assert progress.remaining_s >= 0


def test_remaining_time_by_the_rate() -> None:
    reader = ProgressReader()
    reader.read(report(units_done=0), 0.0)
    progress = reader.read(report(units_done=50), 10.0)
    assert progress is not None
    assert (progress.percentage, progress.remaining_s) == (25, 30)
    finished = reader.read(report(units_done=200, finished=True), 40.0)
    assert finished is not None
    assert (finished.percentage, finished.remaining_s) == (100, 0)
    assert reader.read(b"\xff", 1.0) is None


def test_endless_data_has_no_percentage() -> None:
    assert count_done([{"units": None, "epochs": 1, "units_done": 5}]) == (5.0, None)
    assert count_done([{"units": 10, "epochs": 0, "units_done": 5}]) == (5.0, None)
