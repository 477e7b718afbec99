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
from tests.unit.kube.conftest import write_kubeconfig
from tests.unit.kube.server import ApiServer, Reply


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
    with KubeClient(KubeSettings(kubeconfig=path, timeout_s=2.0)) as client:
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
