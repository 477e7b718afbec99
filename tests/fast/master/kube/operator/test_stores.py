"""What stores say of resources: kept while they are away, told when it changes, each store opened once."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.collective.job_records import prefix
from edl.discovery import Store, open_store
from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.server import StoreServer
from edl.errors import AccessDeniedError, DiscoveryError, KubernetesError, SettingsError
from edl.load_reporting.wanted import wanted_key
from edl.master.kube.operator import owner_keys
from edl.master.kube.operator.owner_keys import OwnerKeyCleanup, delete_job_keys
from edl.master.kube.operator.stores import StoreAllowlist, StoreDirectory, find_percentage, read_progress
from edl.master.kube.operator.surroundings import LiveSurroundings
from edl.master.naming import election_key, report_key
from edl.master.scaling.workers import WorkLeft
from tests.fast.master.kube.operator.owners import make_job, make_pool
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
    found = StoreDirectory(told.append, allowlist)
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
        monkeypatch.setattr("edl.master.kube.operator.stores._AWAY_S", 0.0)
        wait_until(lambda: told, "a look at the resource")
        assert str(port) in directory.ask("a", url, "workers", "j", namespace="lab").unreachable
    with contextlib.closing(StoreServer(str(tmp_path / "served.sqlite"), ListenAddress("127.0.0.1", port))):
        wait_until(lambda: not directory.ask("a", url, "workers", "j", namespace="lab").unreachable, "the return")


def test_word_of_a_dead_master_is_old(
    directory: StoreDirectory, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lives writes it again, each ten seconds; a job that has none of its own waits for it no longer."""
    monkeypatch.setattr("edl.master.kube.operator.stores._SILENT_S", 0.3)
    url = f"sqlite://{tmp_path}/store.sqlite"
    jobs = [make_job("a", store=url), make_job("b", store=url, master={"enabled": True})]
    with open_store(url) as store, contextlib.closing(LiveSurroundings(told.append, StoreAllowlist(url))) as found:
        for job in jobs:
            store.put(wanted_key("workers", job.job_id), wanted(5))
        wait_until(lambda: found.look(jobs[1]).store.wanted == 5)
        wait_until(lambda: found.look(jobs[0]).store.wanted is None, "the silence")
        wait_until(lambda: jobs[0].key in told, "a look at the job")
        assert found.look(jobs[1]).store.wanted == 5, "the operator keeps its master alive"
        monkeypatch.setattr("edl.master.kube.operator.stores._SILENT_S", 600.0)
        wait_until(lambda: found.look(jobs[0]).store.wanted == 5)


def test_refused_store_is_not_opened(
    directory: StoreDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's token is not for any host that whoever writes a resource names."""
    opened: list[str] = []
    monkeypatch.setattr("edl.master.kube.operator.stores.open_store", lambda url: opened.append(url))
    urls = [
        f"sqlite://{tmp_path}/other.sqlite",
        "kubernetes://lab",
        "consul://u:hunter2@evil?t=hunter2",
    ]
    refused = [directory.ask("a", url, "workers", "j", namespace="lab").refused for url in urls]
    assert all(refused)
    assert "hunter2" not in "".join(refused)
    assert opened == []


def test_open_stores_are_bounded(directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise DiscoveryError(f"{url} does not answer")

    def ask(number: int, namespace: str = "lab") -> str:
        url = f"edl://127.0.0.1:{number}"
        return directory.ask(f"job-{number}", url, "workers", "j", namespace=namespace).refused

    monkeypatch.setattr("edl.master.kube.operator.stores._MOST_OF_NAMESPACE", 2)
    monkeypatch.setattr("edl.master.kube.operator.stores._MOST_STORES", 3)
    assert [ask(1), ask(2)] == ["", ""]
    assert "namespace lab keep 2 stores" in ask(3), "refused, so that the job grows, and says why"
    assert ask(4, "other") == "", "a namespace shuts the stores of others"
    assert "3 stores are open" in ask(5, "third")
    directory.forget("job-1")
    assert ask(3) == ""
    for number in range(1, 6):
        directory.forget(f"job-{number}")
    monkeypatch.setattr("edl.master.kube.operator.stores.open_store", refuse)
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
        ("edl://edl-store.edl:29400", True),
        ("edl://edl-store.edl", True),
        ("edl://other", False),
        ("kubernetes://lab", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_stores_that_are_opened(url: str, allowed: bool) -> None:
    prefixes = ("consul://d", "consul://[::1]", "etcd://e:1", "etcd://f", "etcd+https://", "edl://edl-store.edl:29400")
    refusal = StoreAllowlist("consul://c:8500", prefixes).find_refusal(url)
    assert (refusal == "") == allowed, refusal
    for own, other in (("etcd://a:2379,b:2379", "etcd://b,a"), ("sqlite:///tmp/x", "sqlite:///tmp/x")):
        assert StoreAllowlist(own).find_refusal(other) == ""
    assert "--allow-store consul://x:1" in StoreAllowlist("sqlite:///tmp/x").find_refusal("consul://x:1")


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


def test_remaining_time_by_the_rate() -> None:
    left = WorkLeft()
    read_progress(left, report(units_done=0), 0.0)
    progress = read_progress(left, report(units_done=50), 10.0)
    assert progress is not None
    assert (progress.percentage, progress.remaining_s) == (25, 30)
    finished = read_progress(left, report(units_done=200, finished=True), 40.0)
    assert finished is not None
    assert (finished.percentage, finished.remaining_s) == (100, 0)
    assert read_progress(left, b"\xff", 1.0) is None
    assert find_percentage([{"units": None, "epochs": 1, "units_done": 5}]) is None, "endless data"
    assert find_percentage([{"units": 10, "epochs": 0, "units_done": 5}]) is None


STORE = "edl://edl-store.lab"
JOB_KEYS = ("world", "run", "events/1", "ledger/1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite://{tmp_path}/store.sqlite") as store:
        yield store


def fill(store: Store, job_id: str) -> list[str]:
    keys = [*(f"{prefix(job_id)}{name}" for name in JOB_KEYS), f"journals/{job_id}/head/000"]
    keys += [report_key(job_id), wanted_key("workers", job_id)]
    for key in keys:
        store.put(key, b"x")
    return keys


def list_keys(store: Store) -> list[str]:
    return sorted(
        entry.key for part in ("jobs/", "journals/", "master_reports/", "wanted/") for entry in store.list(part)
    )


def test_only_the_jobs_keys_go(store: Store) -> None:
    fill(store, "digits-1")
    others = sorted([*fill(store, "digits-12"), *fill(store, "digits")])
    assert delete_job_keys(store, "digits-1") == ""
    assert list_keys(store) == others
    assert delete_job_keys(store, "digits-1") == "", "nothing is left to do"


@pytest.mark.parametrize("key", [f"{prefix('j')}nodes/a", election_key("j")])
def test_what_is_in_use_stays(store: Store, key: str) -> None:
    """Somebody goes on with the job by hand."""
    keys = fill(store, "j")
    with store.lease(10.0) as lease:
        store.put(key, b"x", lease)
        assert delete_job_keys(store, "j") != ""
        assert set(keys) <= set(list_keys(store))
    assert delete_job_keys(store, "j") == ""
    assert list_keys(store) == []


class Cleanup:
    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pods: bool | Exception = False
        self.opened: list[str] = []
        self.trouble: Exception | None = None

        def open_it(url: str) -> Any:
            self.opened.append(url)
            if self.trouble is not None:
                raise self.trouble
            return contextlib.nullcontext(store)

        monkeypatch.setattr(owner_keys, "open_store", open_it)
        self.cleanup = OwnerKeyCleanup(self._has_pods, lambda url: url == STORE, lambda: self.now_s)
        self.cleanup._loop.close()

    def _has_pods(self, namespace: str, uid: str) -> bool:
        assert namespace == "lab"
        if isinstance(self.pods, Exception):
            raise self.pods
        return self.pods

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s <= end_s:
            wait_s = self.cleanup.step()
            assert wait_s is not None
            assert wait_s > 0
            self.now_s += wait_s


@pytest.fixture
def cleanup(store: Store, monkeypatch: pytest.MonkeyPatch) -> Cleanup:
    return Cleanup(store, monkeypatch)


def test_deleted_job_leaves_no_keys(store: Store, cleanup: Cleanup) -> None:
    job = make_job(store=STORE)
    fill(store, job.job_id)
    cleanup.cleanup.note(job)
    cleanup.run(600)
    assert cleanup.opened == [], "it is there"
    cleanup.cleanup.note_gone(job.key)
    cleanup.pods = True
    cleanup.run(600)
    assert cleanup.opened == [], "its pods run"
    cleanup.pods = KubernetesError("the API server does not answer")
    cleanup.run(300)
    cleanup.pods, cleanup.trouble = False, DiscoveryError("away")
    cleanup.run(300)
    assert list_keys(store)
    cleanup.trouble = None
    cleanup.run(120)
    assert list_keys(store) == []
    opened = len(cleanup.opened)
    cleanup.run(600)
    assert len(cleanup.opened) == opened


def test_namesake_keeps_its_keys(store: Store, cleanup: Cleanup) -> None:
    first, second = make_job(uid="11111111-a", store=STORE), make_job(uid="22222222-b", store=STORE)
    fill(store, first.job_id)
    kept = fill(store, second.job_id)
    cleanup.cleanup.note(first)
    cleanup.cleanup.note(second)
    cleanup.run(300)
    assert list_keys(store) == sorted(kept)


@pytest.mark.parametrize("url", ["consul://c:8500", "edl://other"])
def test_other_stores_keep_their_history(store: Store, cleanup: Cleanup, url: str) -> None:
    job = make_job(store=url)
    cleanup.cleanup.note(job)
    cleanup.cleanup.note_gone(job.key)
    cleanup.run(300)
    assert cleanup.opened == []


@pytest.mark.parametrize("refused", [True, False])
def test_cleanup_gives_up(cleanup: Cleanup, refused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """After two hours, and seldom asked until then where it comes to a refusal by way of an error of discovery."""
    if refused:
        cleanup.trouble = DiscoveryError("not allowed (403)")
        cleanup.trouble.__cause__ = AccessDeniedError("not allowed (403)")
    cleanup.pods = not refused
    cleanup.cleanup.note(make_job(store=STORE))
    cleanup.cleanup.note_gone(make_job(store=STORE).key)
    cleanup.run(2 * 3600)
    assert len(cleanup.opened) == (13 if refused else 0)
    assert len(caplog.records) == 1
    assert cleanup.cleanup._removals == []


@pytest.mark.parametrize("written", [False, True])
def test_what_a_deleted_pool_wanted_goes(store: Store, cleanup: Cleanup, written: bool) -> None:
    """Unless an advisor goes on to write it: another pool, or a person's teachers, may be of the same service."""
    key, other = wanted_key("teachers", "digits"), wanted_key("teachers", "other")
    pool = make_pool(store=STORE)
    for name in (key, other):
        store.put(name, b"x")
    cleanup.cleanup.note(pool)
    cleanup.cleanup.note_gone(pool.key)
    cleanup.pods = True
    cleanup.run(300)
    assert cleanup.opened == [], "its teachers drain"
    cleanup.pods = False
    for number in range(10):
        if written:
            store.put(key, f"{number}".encode())
        cleanup.run(60)
    assert list_keys(store) == ([key, other] if written else [other])
