"""`edl operator`: what it refuses before it begins."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from edl.cli import main
from edl.cli.kube.connection import INSTALL_HINT

ROOT = Path(__file__).parents[4]
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: nowhere
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: nobody, user: {}}]
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody, namespace: lab}}]
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-A", "-n", "lab"], "give either"),
        (["-n", ""], "expected a name"),
        (["--workers", "0"], "workers=0"),
        (["--allow-store", "sqlite:///x"], "--allow-store"),
        (["--resync", "nan"], "resync_s"),
        (["--timeout", "0"], "timeout_s"),
        (["--kubeconfig", "/nowhere/config"], "/nowhere/config"),
    ],
)
def test_what_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(KUBECONFIG)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main(["operator", "--kubeconfig", str(kubeconfig), "--http-port", str(port)]) == 2
    assert "cannot be listened on" in capsys.readouterr().err


def test_install_hint_is_as_documented() -> None:
    """The first words that a person reads who has no operator must work: the same commands as the tested page's."""
    page = (ROOT / "docs/kubernetes-operators.md").read_text()
    assert "helm install edl serving/kube/chart --namespace edl --create-namespace --set image.repository=" in page
    assert (
        "helm install edl serving/kube/chart --namespace edl --create-namespace --set image.repository=" in INSTALL_HINT
    )
    files = [word for word in INSTALL_HINT.split() if word.endswith(".yaml")]
    assert [f"kubectl apply -f {name}" in page for name in files] == [True, True]
