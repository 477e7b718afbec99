"""`edl operator`: what it refuses before it begins."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from edl.cli import main

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
