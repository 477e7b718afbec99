"""The page's look at a cluster, over an API server that only answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.dashboard.state.cluster.view import ClusterView
from edl.kube.settings import KubeSettings
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request


@pytest.fixture
def server() -> Iterator[ApiServer]:
    pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
    server = ApiServer()

    def answer(request: Request) -> Reply:
        place = request.path.split("/namespaces/")[1].split("/")[0]
        job = {"metadata": {"name": "same", "namespace": place, "uid": place}, "spec": {}, "status": {}}
        items = [job] if "/elasticjobs" in request.path else []
        return Reply(200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})

    server.answer = answer
    yield server
    server.close()


@pytest.mark.parametrize(
    ("named", "shown"),
    [((), ["own"]), (("",), ["own"]), (("red", "blue", "red"), ["red", "blue"]), (("red", ""), ["red", "own"])],
)
def test_jobs_of_each_namespace(server: ApiServer, tmp_path: Path, named: tuple[str, ...], shown: list[str]) -> None:
    view = ClusterView(KubeSettings(write_kubeconfig(tmp_path / "config", server.url, namespace="own")), named)
    try:
        found = view.read()
    finally:
        view.close()
    assert found.stale == ""
    assert list(found.namespaces) == shown
    assert sorted(job.namespace for job in found.jobs) == sorted(shown)
    assert len(server.requests) == 3 * len(shown), "a list each of jobs, pools and pods"
