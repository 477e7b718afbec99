"""What a node reports of a probe that fails, with a program of a line in the probe's place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.collective.agent.health.node_check import runner
from edl.collective.agent.health.node_check.pairing import NodeCheckResult
from edl.collective.agent.health.node_check.runner import NodeCheckSettings, check_nodes
from edl.discovery import open_store
from tests.waiting import wait_until


def test_error_need_not_be_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver or a shell may write anything to standard error, and its last line is the reason all the same."""
    program = tmp_path / "probe"
    program.write_text("#!/bin/sh\nprintf '\\377 is broken\\n' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        found = check_nodes(store, "check", "a", "127.0.0.1", ["a"], NodeCheckSettings())
    assert found == NodeCheckResult({"a": "could not compute: \N{REPLACEMENT CHARACTER} is broken"})


def test_last_words_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe has said all and ended before the thread that reads its words gets a turn."""
    program = tmp_path / "probe"
    program.write_text("""#!/bin/sh\necho '{"compute_s": 0.5}'\necho '{"reduce_s": 0.0}'\n""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    probes: list[subprocess.Popen[str]] = []
    polls: list[bool] = []  # since the probe has ended
    start, read = subprocess.Popen, runner._read_lines

    def started(*arguments: Any, **settings: Any) -> subprocess.Popen[str]:
        probes.append(start(*arguments, **settings))
        return probes[-1]

    def read_late(pipe: Any, record: Callable[[str], object]) -> None:
        wait_until(lambda: len(polls) > 3, "its words were asked for in vain")
        read(pipe, record)

    def note_poll() -> None:
        if probes and probes[-1].poll() is not None:
            polls.append(True)

    monkeypatch.setattr(runner.subprocess, "Popen", started)
    monkeypatch.setattr(runner, "_read_lines", read_late)
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        own = runner._OwnNode(store, "check", "a", "127.0.0.1", NodeCheckSettings(raise_if_stopping=note_poll))
        results = runner._run_round(own, 1, (("a",),), ["a"])
    assert (results["a"].compute_s, results["a"].reduce_s, results["a"].error) == (0.5, 0.0, "")
