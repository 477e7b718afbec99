"""What stores say of resources: kept while they are away, told when it changes, each store opened once."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.discovery import open_store
from edl.discovery.served.listening import ListenAddress
from edl.discovery.served.server import StoreServer
from edl.errors import DiscoveryError, SettingsError
from edl.kube.settings import KubeSettings
from edl.load_reporting.wanted import wanted_key
from edl.master.kube.operator.live_surroundings import LiveSurroundings
from edl.master.kube.operator.store_allowlist import StoreAllowlist
from edl.master.kube.operator.stores import StoreDirectory
from edl.master.kube.operator.stores.progress import ProgressReader, count_done
from edl.master.naming import report_key
from tests.fast.master.kube.operator.owners import make_job
from tests.waiting import wait_until


def wanted(count: int, **fields: Any) -> bytes:
    record = {"v": 1, "count": count, "now": 0, "since": 1.0, "time": 1.0, "reason": "r", "decisions": []}
    return json.dumps({**record, **fields}).encode()


def report(**dataset: Any) -> bytes:
    return json.dumps({"datasets": [{"name": "d", "units": 100, "epochs": 2, **dataset}]}).encode()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def directory(told: list[str], tmp_path: Path) -> Iterator[StoreDirectory]:
    allowlist = StoreAllowlist(f"sqlite://{tmp_path}/store.sqlite", ("edl://127.0.0.1", "consul://127.0.0.1"))
    found = StoreDirectory(told.append, allowlist, KubeSettings())
    yield found
    found.close()


def test_wanted_and_progress(directory: StoreDirectory, told: list[str], tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.sqlite"
    with open_store(url) as store:
        first = directory.ask("a", url, "workers", "job-1", namespace="lab")
        assert first.wanted is None
        assert first.stale or first.progress is None
        wait_until(lambda: told, "the first answer")
        assert directory.ask("a", url, "workers", "job-1", namespace="lab").stale == ""
        told.clear()
        store.put(wanted_key("workers", "job-1"), wanted(5))
        wait_until(lambda: told == ["a"], "the change")
        assert directory.ask("a", url, "workers", "job-1", namespace="lab").wanted == 5
        store.put(wanted_key("workers", "job-1"), wanted(5, reason="the same"))
        store.put(wanted_key("workers", "another"), wanted(7))
        store.put(report_key("job-1"), report(units_done=50))
        wait_until(
            lambda: directory.ask("a", url, "workers", "job-1", namespace="lab").progress is not None, "the progress"
        )
        progress = directory.ask("a", url, "workers", "job-1", namespace="lab").progress
        assert progress is not None
        assert progress.percentage == 25
        assert told in (["a"], ["a", "a"]), "told of what is another's, or says nothing new"
        store.delete(wanted_key("workers", "job-1"))
        wait_until(lambda: directory.ask("a", url, "workers", "job-1", namespace="lab").wanted is None, "the removal")


def test_store_away_keeps_what_was_wanted(directory: StoreDirectory, told: list[str], tmp_path: Path) -> None:
    server = StoreServer(str(tmp_path / "served.sqlite"), ListenAddress("127.0.0.1", 0))
    url = f"edl://127.0.0.1:{server.port}"
    with contextlib.closing(server), open_store(url) as store:
        store.put(wanted_key("teachers", "digits"), wanted(3))
        wait_until(lambda: directory.ask("p", url, "teachers", "digits", namespace="lab").wanted == 3, "what is wanted")
    wait_until(lambda: directory.ask("p", url, "teachers", "digits", namespace="lab").stale, "the loss")
    assert directory.ask("p", url, "teachers", "digits", namespace="lab").wanted == 3


def test_store_away_for_long_is_said(
    directory: StoreDirectory, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as refusing:  # no other program has its port meanwhile
        refusing.bind(("127.0.0.1", 0))
        port = refusing.getsockname()[1]
        url = f"edl://127.0.0.1:{port}"
        wait_until(lambda: str(port) in directory.ask("a", url, "workers", "j", namespace="lab").stale, "a refusal")
        assert directory.ask("a", url, "workers", "j", namespace="lab").unreachable == "", "it may answer yet"
        monkeypatch.setattr("edl.master.kube.operator.stores.follower._AWAY_S", 0.0)
        wait_until(lambda: told, "a look at the resource")
        assert str(port) in directory.ask("a", url, "workers", "j", namespace="lab").unreachable
    with contextlib.closing(StoreServer(str(tmp_path / "served.sqlite"), ListenAddress("127.0.0.1", port))):
        wait_until(lambda: not directory.ask("a", url, "workers", "j", namespace="lab").unreachable, "the return")


def test_word_of_a_dead_master_is_old(
    directory: StoreDirectory, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lives writes it again, each ten seconds; a job that has none of its own waits for it no longer."""
    monkeypatch.setattr("edl.master.kube.operator.stores.follower._SILENT_S", 0.3)
    url = f"sqlite://{tmp_path}/store.sqlite"
    jobs = [make_job("a", store=url), make_job("b", store=url, master={"enabled": True})]
    with open_store(url) as store, contextlib.closing(LiveSurroundings(told.append, StoreAllowlist(url))) as found:
        for job in jobs:
            store.put(wanted_key("workers", job.job_id), wanted(5))
        wait_until(lambda: found.look(jobs[1]).wanted == 5)
        wait_until(lambda: found.look(jobs[0]).wanted is None, "the silence")
        wait_until(lambda: jobs[0].key in told, "a look at the job")
        assert found.look(jobs[1]).wanted == 5, "the operator keeps its master alive"
        monkeypatch.setattr("edl.master.kube.operator.stores.follower._SILENT_S", 600.0)
        wait_until(lambda: found.look(jobs[0]).wanted == 5)


def test_refused_store_is_not_opened(
    directory: StoreDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's token is not for any host that whoever writes a resource names."""
    opened: list[str] = []
    monkeypatch.setattr(
        "edl.master.kube.operator.stores.follower.open_cluster_store", lambda url, kube: opened.append(url)
    )
    urls = [
        f"sqlite://{tmp_path}/other.sqlite",
        "kubernetes://lab?kubeconfig=/etc/x",
        "consul://u:hunter2@evil?t=hunter2",
    ]
    refused = [directory.ask("a", url, "workers", "j", namespace="lab").refused for url in urls]
    assert all(refused)
    assert "hunter2" not in "".join(refused)
    assert opened == []


def test_open_stores_are_bounded(directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, kube: KubeSettings) -> None:
        raise DiscoveryError(f"{url} does not answer")

    def ask(number: int, namespace: str = "lab") -> str:
        url = f"edl://127.0.0.1:{number}"
        return directory.ask(f"job-{number}", url, "workers", "j", namespace=namespace).refused

    monkeypatch.setattr("edl.master.kube.operator.stores.directory._MOST_OF_NAMESPACE", 2)
    monkeypatch.setattr("edl.master.kube.operator.stores.directory._MOST_STORES", 3)
    assert [ask(1), ask(2)] == ["", ""]
    assert "namespace lab hold 2 stores" in ask(3), "refused, so that the job grows, and says why"
    assert ask(4, "other") == "", "a namespace shuts the stores of others"
    assert "3 stores are open" in ask(5, "third")
    directory.forget("job-1")
    assert ask(3) == ""
    for number in range(1, 6):
        directory.forget(f"job-{number}")
    monkeypatch.setattr("edl.master.kube.operator.stores.follower.open_cluster_store", refuse)
    for port in range(3, 50):
        directory.ask("job", f"edl://127.0.0.1:{port}", "workers", "j", namespace="lab")
    assert len(directory._failed) == 1, "what no resource names is remembered"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("consul://c:8500", True),
        ("consul://C/", True),
        ("consul://c:8500?dc=east", False),
        ("consul://c:9", False),
        ("consul+https://c:8500", False),
        ("consul://u@c:8500", False),
        ("consul://c:8500/x", False),
        ("consul://c:8500@evil", False),
        ("consul://d:77", True),
        ("consul://d.evil", False),
        ("consul://d,evil", False),
        ("consul://", False),
        ("consul://[0:0::1]:8500", True),
        ("etcd://e:1,f:1", True),
        ("etcd://e:1,evil:1", False),
        ("etcd://e:1,f:99999", False),
        ("etcd+https://anything:1", True),
        ("etcd+https://", False),
        ("sqlite:///tmp/x", False),
        ("kubernetes://lab", True),
        ("kubernetes://shared", True),
        ("kubernetes://other", False),
        ("kubernetes://lab?context=x", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_stores_that_are_opened(url: str, allowed: bool) -> None:
    prefixes = ("consul://d", "consul://[::1]", "etcd://e:1", "etcd://f", "etcd+https://", "kubernetes://shared")
    refusal = StoreAllowlist("consul://c:8500", prefixes).find_refusal(url, "lab")
    assert (refusal == "") == allowed, refusal


@pytest.mark.parametrize(
    "prefix",
    ["sqlite://", "consul://a:", "consul", "consul://u@x", "consul://x?dc=1", "etcd://a,b", "consul://x/y", "edl://:1"],
)
def test_allowances_that_cannot_be(prefix: str) -> None:
    with pytest.raises(SettingsError, match="--allow-store"):
        StoreAllowlist("", (prefix,))


def test_advisor_runs_for_auto_pools(directory: StoreDirectory, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.sqlite"
    directory.ask("p", url, "teachers", "digits", namespace="lab", advised=True)
    with open_store(url) as store:
        wait_until(lambda: store.get("elections/advisor"), "the advisor")
        directory.ask("p", url, "teachers", "digits", namespace="lab", advised=False)
        wait_until(lambda: store.get("elections/advisor") is None, "the advisor's end")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["datasets", "units", "epochs", "units_done", "finished", "name"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=25)
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
    assert count_done([{"units": None, "epochs": 1, "units_done": 5}]) == (5.0, None), "endless data"
    assert count_done([{"units": 10, "epochs": 0, "units_done": 5}]) == (5.0, None)


@pytest.mark.parametrize(
    ("own", "url", "refusal"),
    [
        ("consul://c", "consul://c:8500", ""),
        ("etcd://a:2379,b:2379", "etcd://b,a", ""),
        ("sqlite:///tmp/x", "sqlite:///tmp/x", ""),
        ("sqlite:///tmp/x", "consul://x:1", "--allow-store consul://x:1"),
        ("kubernetes://edl?context=prod", "kubernetes://edl?context=prod", ""),
        ("kubernetes://edl?context=prod", "kubernetes://edl", "kubernetes://edl"),  # which is in another cluster
        ("http://x", "consul://c", "--allow-store"),
    ],
)
def test_own_store_is_allowed(own: str, url: str, refusal: str) -> None:
    found = StoreAllowlist(own).find_refusal(url, "lab")
    assert refusal in found
    assert bool(found) == bool(refusal)
