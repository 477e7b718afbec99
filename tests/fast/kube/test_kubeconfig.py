"""What a kubeconfig says is done, or refused: nothing of it is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingsError
from edl.kube.client import KubeClient
from edl.kube.resource_types import PODS
from edl.kube.settings import KubeSettings
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, status


def with_cluster(path: str, **fields: Any) -> str:
    """Write fields of the cluster into a kubeconfig."""
    config = json.loads(Path(path).read_text())
    config["clusters"][0]["cluster"].update(fields)
    Path(path).write_text(json.dumps(config))
    return path


def test_proxy_of_the_cluster(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before that of the environment, and NO_PROXY is not asked, as for kubectl."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    path = write_kubeconfig(tmp_path / "config", "http://behind.example:6443")
    with_cluster(path, **{"proxy-url": server.url})
    server.answer = lambda request: Reply(200, {"items": [], "metadata": {"resourceVersion": "1"}})
    with KubeClient(KubeSettings(kubeconfig=path, timeout_s=20.0)) as client:
        assert client.list(PODS, "n").items == []
    assert server.requests[0].path.startswith("http://behind.example:6443/api/v1/namespaces/n/pods")


def test_unknown_proxy_is_refused(tmp_path: Path) -> None:
    path = with_cluster(
        write_kubeconfig(tmp_path / "config", "http://a:1"), **{"proxy-url": "socks5://me:secret@bastion:1080"}
    )
    with pytest.raises(SettingsError, match="proxy-url socks5://") as caught:
        KubeClient(KubeSettings(kubeconfig=path))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["as", "as-groups"])
def test_acting_as_another_is_refused(server: ApiServer, tmp_path: Path, field: str) -> None:
    """Without it, EDL would act with the rights of who may impersonate."""
    user = {"token": "t", field: "alice" if field == "as" else ["viewers"]}
    path = write_kubeconfig(tmp_path / "config", server.url, user)
    with pytest.raises(SettingsError, match=rf"user 'u' sets {field}\b"):
        KubeClient(KubeSettings(kubeconfig=path))


def with_plugin(path: Path, url: str, script: str) -> str:
    """Write a kubeconfig whose user is what a command says."""
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/sh", "args": ["-c", script]}
    return write_kubeconfig(path, url, {"exec": plugin})


def says(token: str) -> str:
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"},
    }
    return f"echo '{json.dumps(credential)}'"


@pytest.mark.parametrize("script", ["echo expired >&2; exit 1", "echo '{}'"])
def test_failed_plugin_is_no_anonymous_user(server: ApiServer, tmp_path: Path, script: str) -> None:
    path = with_plugin(tmp_path / "config", server.url, script)
    with pytest.raises(SettingsError, match="the command '/bin/sh' of user 'u' gives no credentials"):
        KubeClient(KubeSettings(kubeconfig=path))
    assert server.requests == []


def test_plugin_that_hangs_is_an_error(server: ApiServer, tmp_path: Path) -> None:
    path = with_plugin(tmp_path / "config", server.url, "exec sleep 600")
    with pytest.raises(SettingsError, match=r"no credentials within 0\.6 s"):
        KubeClient(KubeSettings(kubeconfig=path, timeout_s=0.2))


def test_plugin_is_asked_again_after_a_401(server: ApiServer, tmp_path: Path) -> None:
    """And not before: what the official client does with a token that has expired has no deadline."""
    token_file = tmp_path / "token_file"
    token_file.write_text("old")
    path = with_plugin(tmp_path / "config", server.url, says("TOKEN").replace("TOKEN", f"'$(cat {token_file})'"))

    def answer(request: Request) -> Reply:
        if request.headers["authorization"] != "Bearer new":
            return status(401, "Unauthorized", "Unauthorized")
        return Reply(200, {"items": [], "metadata": {"resourceVersion": "1"}})

    server.answer = answer
    with KubeClient(KubeSettings(kubeconfig=path, timeout_s=20.0)) as client:
        token_file.write_text("new")
        assert client.list(PODS, "n").items == []
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer old", "Bearer new"]
