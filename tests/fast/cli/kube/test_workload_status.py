"""Which store `edl status` opens for a job of a cluster: whoever wrote the job named it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.cli.kube.targets import Target
from edl.cli.kube.workload_status import WorkloadLook, WorkloadStatus
from edl.discovery import open_store
from edl.errors import SettingsError
from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request
from tests.fast.kube.server import status as status_reply


@pytest.fixture
def server() -> Iterator[ApiServer]:
    pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
    server = ApiServer()
    yield server
    server.close()


def look(server: ApiServer, folder: Path, store: str, store_url: str = "") -> WorkloadLook:
    """Look at a running job with a store, over a kubeconfig that is not the current one."""
    resource: dict[str, Any] = {
        "metadata": {"name": "j", "namespace": "research", "uid": "u"},
        "spec": {"store": store},
        "status": {"jobId": "j-1", "phase": "Running"},
    }

    def answer(request: Request) -> Reply:
        if request.path.endswith("/elasticjobs/j"):
            return Reply(200, resource)
        if "/configmaps/" in request.path:
            return status_reply(404, "NotFound", "there is none", name="j", kind="configmaps")
        return Reply(200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})

    server.answer = answer
    settings = KubeSettings(kubeconfig=write_kubeconfig(folder / "prod", server.url, namespace="research"))
    with (
        KubeClient(replace(settings, timeout_s=2.0)) as client,
        WorkloadStatus(client, Target("job", "j", resource), 3, store_url) as status,
    ):
        return status.read()


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current cluster and the user's own store are others."""
    monkeypatch.setenv("KUBECONFIG", write_kubeconfig(tmp_path / "current", "http://127.0.0.1:9"))
    monkeypatch.setenv("EDL_DISCOVERY", f"sqlite://{tmp_path}/own.sqlite")


@pytest.mark.parametrize(("store", "where"), [("kubernetes://stores", "stores"), ("kubernetes://", "research")])
def test_store_of_the_cluster_looked_at(server: ApiServer, tmp_path: Path, store: str, where: str) -> None:
    assert look(server, tmp_path, store).trouble == ""
    asked = [request for request in server.requests if "/configmaps" in request.path]
    assert asked
    assert all(f"/namespaces/{where}/configmaps" in request.path for request in asked)
    assert {request.method for request in server.requests} == {"GET"}, "who looks changes nothing"
    assert not [request for request in server.requests if "/leases" in request.path]


@pytest.mark.parametrize(
    "store",
    ["consul://evil:8500", "etcd://evil:2379", "edl://evil:29400", "sqlite:///{}/made", "kubernetes://x?kubeconfig={}"],
)
def test_store_that_a_stranger_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr("edl.cli.kube.workload_status.open_store", refuse)
    found = look(server, tmp_path, store.format(tmp_path))
    assert found.job is None
    assert "--store" in found.trouble
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("named", ["EDL_DISCOVERY", "--store"])
def test_store_that_the_user_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    url = f"sqlite://{tmp_path}/theirs.sqlite"
    opened = []
    monkeypatch.setattr(
        "edl.cli.kube.workload_status.open_store", lambda url, timeout_s: (opened.append(url), open_store(url))[1]
    )
    if named == "EDL_DISCOVERY":
        monkeypatch.setenv(named, url)
        assert look(server, tmp_path, url).trouble == ""
    else:
        assert look(server, tmp_path, "consul://in-the-cluster:8500", url).trouble == ""
    assert opened == [url]


def test_another_job_of_the_same_name(server: ApiServer, tmp_path: Path) -> None:
    """It was deleted and made again: who watches the first does not go on with the second."""
    made = {"metadata": {"name": "j", "namespace": "research", "uid": "second"}, "spec": {}, "status": {}}
    server.answer = lambda request: Reply(200, made if request.path.endswith("/elasticjobs/j") else {"items": []})
    first = Target("job", "j", {"metadata": {"name": "j", "namespace": "research", "uid": "first"}})
    path = write_kubeconfig(tmp_path / "prod", server.url, namespace="research")
    with (
        KubeClient(KubeSettings(kubeconfig=path)) as client,
        WorkloadStatus(client, first, 3) as watched,
        pytest.raises(SettingsError, match="deleted, and another made of its name"),
    ):
        watched.read()
