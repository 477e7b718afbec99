"""How workers' ends are described: by the kernel's counter, too, where it killed for want of memory."""

from __future__ import annotations

import json
import signal
from itertools import chain, repeat
from pathlib import Path

import pytest

from edl import cgroups
from edl.collective.agent.health.failures import ExitCause
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.membership.rendezvous import RendezvousSettings
from edl.collective.agent.processes.pool import WorkerExit
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.agent.workers.generation_outcome import GenerationOutcome


def outcome_of(folder: Path, status: int, rank: int = 0, leave_on_oom: bool = False) -> GenerationOutcome:
    program, rendezvous = ProgramSpec("script", "train.py"), RendezvousSettings(1, 2)
    made = GenerationOutcome(LaunchSpec("resnet", program, 1, rendezvous, "10.0.0.1", leave_on_oom=leave_on_oom))
    made.begin_generation(0.0)
    made.record_exit(WorkerExit(0, 0, 1, status), rank, {0: folder / "error.json"})
    return made


@pytest.mark.parametrize(
    ("before", "after", "status", "named"),
    [
        (2, 3, -signal.SIGKILL, True),
        (2, 2, -signal.SIGKILL, False),
        (2, 3, 1, False),
        (None, 1, -signal.SIGKILL, False),
        (2, None, -signal.SIGKILL, False),
    ],
)
def test_want_of_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: int | None, after: int | None, status: int, named: bool
) -> None:
    counts = chain([before], repeat(after))
    monkeypatch.setattr(cgroups, "read_oom_kills", lambda: next(counts))
    outcome = outcome_of(tmp_path, status)
    decision = outcome.decide_recovery(0, (), missing=False, trained=True, step=0)
    if status == -signal.SIGKILL:
        assert decision is not None
        assert ("too little memory" in decision.restart) == named, decision.restart
    else:
        assert decision is None or "memory" not in decision.restart + decision.fatal


def test_old_records_excuse_an_exit_code(tmp_path: Path) -> None:
    """A machine stood still after the records were read: since then the lease of a lost node may have ended."""
    outcome = outcome_of(tmp_path, 3)
    outcome._failed_at -= 100.0
    read_at = outcome._failed_at + 1.0
    assert outcome.decide_recovery(0, (), missing=False, trained=True, step=0, known_at=read_at) is None
    decision = outcome.decide_recovery(0, (), missing=False, trained=True, step=0, known_at=read_at + 50.0)
    assert decision is not None
    assert "exit code 3" in decision.fatal


DATA_LOADER = "RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("kills", "status", "text", "leaves"),
    [
        (1, -signal.SIGKILL, "", True),
        (0, -signal.SIGKILL, "", False),
        (None, -signal.SIGKILL, "", False),
        (1, -signal.SIGSEGV, "", False),
        (1, 1, DATA_LOADER, True),
        (0, 1, DATA_LOADER, False),
    ],
)
def test_want_of_memory_may_end_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int | None, status: int, text: str, leaves: bool
) -> None:
    counts = chain([5], repeat(None if kills is None else 5 + kills))
    monkeypatch.setattr(cgroups, "read_oom_kills", lambda: next(counts))
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": text}}))
    outcome = outcome_of(tmp_path, status, rank=3, leave_on_oom=True)
    decision = outcome.decide_recovery(0, (), missing=False, trained=True, step=0)
    assert decision is not None
    assert decision.needs_memory is leaves
    assert (decision.rank, decision.cause, decision.oom_kills) == (3, ExitCause.KILLED, kills)
    outcome.clear_generation()
    outcome.begin_generation(0.0)
    outcome.record_exit(WorkerExit(0, 0, 1, -signal.SIGKILL), 3, {0: tmp_path / "error.json"})
    again = outcome.decide_recovery(0, (), missing=False, trained=True, step=0)
    assert again is not None
    assert not again.needs_memory, "that was the generation before"
