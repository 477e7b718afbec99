"""What a node reports of a probe that fails, with a program of a line in the probe's place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edl.collective.agent.health.node_check.pairing import NodeCheckResult
from edl.collective.agent.health.node_check.runner import NodeCheckSettings, check_nodes
from edl.discovery import open_store


def test_error_need_not_be_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver or a shell may write anything to standard error, and its last line is the reason all the same."""
    program = tmp_path / "probe"
    program.write_text("#!/bin/sh\nprintf '\\377 is broken\\n' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        found = check_nodes(store, "check", "a", "127.0.0.1", ["a"], NodeCheckSettings())
    assert found == NodeCheckResult({"a": "could not compute: \N{REPLACEMENT CHARACTER} is broken"})
