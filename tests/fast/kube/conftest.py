"""An API server of the test's own, and a client of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from tests.fast.kube.server import ApiServer

pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")


@pytest.fixture
def server(stack: ExitStack) -> ApiServer:
    return stack.enter_context(closing(ApiServer()))


def write_kubeconfig(path: Path, url: str, user: dict[str, Any] | None = None, **context: str) -> str:
    """Write a kubeconfig with a single context."""
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": user or {"token": "secret-1"}}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", **context}}],
                "current-context": "here",
            }
        )
    )
    return str(path)


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> str:
    return write_kubeconfig(tmp_path / "config", server.url, namespace="here")


@pytest.fixture
def timeout_s() -> float:
    """How long the client waits for an answer, in seconds; tests of silence have less. A busy machine takes seconds."""
    return 20.0


@pytest.fixture
def client(kubeconfig: str, timeout_s: float) -> Iterator[KubeClient]:
    with KubeClient(KubeSettings(kubeconfig=kubeconfig, timeout_s=timeout_s)) as client:
        yield client
