"""Keys of deleted jobs and pools: gone when nothing uses them, and no other's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.collective.job_records import prefix
from edl.discovery import Store, open_store
from edl.errors import AccessDeniedError, DiscoveryError, KubernetesError
from edl.kube.settings import KubeSettings
from edl.load_reporting.wanted import wanted_key
from edl.master.kube.operator.stores import owner_keys
from edl.master.kube.operator.stores.owner_keys import OwnerKeyCleanup, delete_job_keys
from edl.master.naming import election_key, report_key
from tests.fast.master.kube.operator.owners import make_job, make_pool

STORE = "kubernetes://lab"
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
    """A cleanup whose clock and pods are the test's."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pods: bool | Exception = False
        self.opened: list[str] = []
        self.trouble: Exception | None = None

        def open_it(url: str, kube: KubeSettings) -> Any:
            self.opened.append(url)
            if self.trouble is not None:
                raise self.trouble
            return contextlib.nullcontext(store)

        monkeypatch.setattr(owner_keys, "open_cluster_store", open_it)
        self.cleanup = OwnerKeyCleanup(
            self._has_pods, lambda url, namespace: url.endswith(namespace), KubeSettings(), lambda: self.now_s
        )
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


@pytest.mark.parametrize("url", ["consul://c:8500", "kubernetes://other"])
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
