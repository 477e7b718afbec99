"""How workers' ends are described: by the kernel's counter, too, where it killed for want of memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from edl import cgroups
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.membership.rendezvous import RendezvousSettings
from edl.collective.agent.processes.pool import WorkerExit
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.agent.workers.generation_outcome import GenerationOutcome


@pytest.mark.parametrize(
    ("before", "after", "status", "named"),
    [
        (2, 3, -signal.SIGKILL, True),
        (2, 2, -signal.SIGKILL, False),
        (2, 3, -signal.SIGSEGV, False),
        (2, 3, 1, False),
        (None, 1, -signal.SIGKILL, False),
        (2, None, -signal.SIGKILL, False),
    ],
)
def test_want_of_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: int | None, after: int | None, status: int, named: bool
) -> None:
    counts = iter([before, after])
    monkeypatch.setattr(cgroups, "read_oom_kills", lambda: next(counts))
    program, rendezvous = ProgramSpec("script", "train.py"), RendezvousSettings(1, 1)
    outcome = GenerationOutcome(LaunchSpec("resnet", program, 1, rendezvous, "10.0.0.1"))
    outcome.begin_generation(0.0)
    outcome.record_exit(WorkerExit(0, 0, 1, status), 0, {0: tmp_path / "error.json"})
    decision = outcome.decide_recovery(0, (), missing=False, trained=True, step=0)
    if status == -signal.SIGKILL:
        assert decision is not None
        assert ("too little memory" in decision.restart) == named, decision.restart
    else:
        assert decision is None or "memory" not in decision.restart + decision.fatal
