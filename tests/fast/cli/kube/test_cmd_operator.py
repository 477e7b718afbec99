"""`edl operator`: what it refuses before it begins."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from edl.cli import main
from edl.cli.kube.connection import INSTALL_HINT
from tests.fast.kube.conftest import write_kubeconfig

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-A", "-n", "lab"], "give either"),
        (["-n", ""], "expected a name"),
        (["--resync", "nan"], "resync_s"),
        (["--kubeconfig", "/nowhere/config"], "/nowhere/config"),
    ],
)
def test_what_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9", namespace="lab")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main(["operator", "--kubeconfig", kubeconfig, "--http-port", str(port)]) == 2
    assert "cannot be listened on" in capsys.readouterr().err


def test_install_hint_is_as_documented() -> None:
    """The first words that a person reads who has no operator must work: the same commands as the tested page's."""
    page = (ROOT / "docs/kubernetes-operators.md").read_text()
    command = "helm install edl serving/kube/chart --namespace edl --create-namespace --set image.repository="
    assert command in page
    assert command in INSTALL_HINT
    files = [word for word in INSTALL_HINT.split() if word.endswith(".yaml")]
    assert [f"kubectl apply -f {name}" in page for name in files] == [True, True]
