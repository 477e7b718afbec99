"""A CRD is deleted while watches of pods have no answer yet: the operator notices, and goes on when it is back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edl.background import start_call
from edl.kube.client import KubeClient
from edl.kube.resource_types import ELASTIC_JOBS
from edl.kube.settings import KubeSettings
from edl.master.kube.operator import resource_watches
from edl.master.kube.operator.monitoring.health import OperatorHealth
from edl.master.kube.operator.resource_watches import ResourceWatches
from tests.waiting import wait_until

NAMESPACES = [f"lab-{number}" for number in range(6)]
GROUP = "/apis/edl.io"


def describe_resource(kind: str, plural: str) -> dict[str, Any]:
    verbs = ["list", "watch", "patch", "get"]
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": True, "verbs": verbs}


def describe_group(version: str, *resources: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "APIResourceList", "groupVersion": version, "resources": list(resources)}


class SlowServer:
    """Answers lists at once, and no watch; of EDL's resources nothing while `deleted`."""

    def __init__(self) -> None:
        self.deleted = False
        self.watches: list[str] = []
        self.closed = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        start_call("edl-test-slow-server", lambda: self._server.serve_forever(0.05))

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        hidden = path.startswith(GROUP)
        if "watch=true" in query:
            self.watches.append(path)
            while not (hidden and self.deleted):
                if self.closed.wait(0.05):
                    return
        found = None if hidden and self.deleted else self.find(path)
        data = json.dumps(found or {"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"}).encode()
        request.send_response(200 if found else 404)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @staticmethod
    def find(path: str) -> dict[str, Any] | None:
        version = {"groupVersion": "edl.io/v1alpha1", "version": "v1alpha1"}
        group = {"name": "edl.io", "versions": [version], "preferredVersion": version}
        known: dict[str, dict[str, Any]] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": [group]},
            GROUP: {"kind": "APIGroup", **group},
            "/api/v1": describe_group(
                "v1",
                describe_resource("Pod", "pods"),
                {**describe_resource("Namespace", "namespaces"), "namespaced": False},
            ),
            f"{GROUP}/v1alpha1": describe_group("edl.io/v1alpha1", describe_resource("ElasticJob", "elasticjobs")),
        }
        if path in known:
            return known[path]
        return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}


@pytest.fixture
def server() -> Iterator[SlowServer]:
    found = SlowServer()
    yield found
    found.close()


def test_deleted_crd_ends_no_operator(server: SlowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_watches, "_HUNG_S", 0.5)
    monkeypatch.setattr(resource_watches, "_CRD_WAIT_S", 0.1)
    path = tmp_path / "kubeconfig.json"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    settings, health = KubeSettings(kubeconfig=str(path)), OperatorHealth(lambda: 0.0)
    with KubeClient(settings) as client:
        nothing: Any = lambda *args: None  # noqa: E731
        watches = ResourceWatches(client, settings, [ELASTIC_JOBS], NAMESPACES, nothing, nothing, health)
        try:
            wait_until(lambda: len(set(server.watches)) == 2 * len(NAMESPACES), "watches of all namespaces")
            wait_until(lambda: not health.check_ready(), "readiness")
            server.deleted = True
            wait_until(lambda: "elasticjobs.edl.io" in health.check_ready(), "unreadiness")
            server.deleted = False
            server.watches.clear()
            wait_until(lambda: not health.check_ready(), "readiness again")
            wait_until(lambda: len(set(server.watches)) == 2 * len(NAMESPACES), "the watches again")
        finally:
            watches.close()
