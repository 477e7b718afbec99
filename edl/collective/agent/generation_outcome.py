"""How this node's workers ended in a generation, and what follows for the job."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from edl import cgroups
from edl.collective.agent.health import failures
from edl.collective.agent.health.failures import ExitCause, KernelLog, RecoveryDecision, WorkerFailure
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.processes.pool import WorkerExit

__all__ = ["GenerationOutcome", "HANGING", "RestartPolicy"]


_FRUITLESS: Final = 10
"""This many restarts in a row without progress end a job.

A flapping node may need several before it is excluded; a script that cannot get further would otherwise hold its GPUs
for ever.
"""
_FRUITFUL_S: Final = 60.0
"""Workers that ran for longer than this made progress, as far as can be told of a script that reports no steps.

It takes less to start, connect and fail again.
"""

HANGING = "the workers hang"
"""Beginning of a restart's reason that makes every node log the stacks of its workers."""

_REGULAR: Final = (
    "they do so every {} steps, which a new start does not help: if the script does something long there, such as an "
    "evaluation, it was broken off and left out. Put it into Checkpointer.busy() or evaluate(), or choose a longer "
    "--hang-after"
)


class RestartPolicy:
    """Limits the restarts of a node's workers."""

    def __init__(self, max_forgiven: int) -> None:
        self._max_forgiven = max_forgiven
        self._fruitless = 0
        self._best_step = -1
        self._unclear_faults = 0
        self._hung_after: list[int] = []  # the last steps before workers were killed because they hung

    def apply_limits(self, decision: RecoveryDecision, forgiven: int, step: int) -> RecoveryDecision:
        """Return the decision, changed where earlier failures and restarts require it.

        Args:
            decision: What follows from the latest failures alone.
            forgiven: How many errors of the script itself the job has survived.
            step: The last step that any worker finished; -1 for none.
        """
        if decision.unclear and self._unclear_faults:
            return replace(decision, leave_out=True)
        if decision.fatal and forgiven < self._max_forgiven:
            return replace(decision, restart=decision.fatal.split("\n", 1)[0], fatal="", after_error=True)
        if decision.restart and self._fruitless >= _FRUITLESS and self._best_step >= step:
            why = f"{_FRUITLESS} restarts in a row led nowhere; the last because {decision.restart}"
            fatal = "\n".join(filter(None, (why, decision.traceback)))
            return replace(decision, restart="", fatal=fatal, unclear=False, leave_out=False)
        if decision.restart.startswith(HANGING) and self._hangs_regularly(step):
            why = f"{decision.restart}; {_REGULAR.format(step - self._hung_after[-1])}"
            return replace(decision, restart="", fatal=why, cause=ExitCause.ERROR)
        return decision

    def _hangs_regularly(self, step: int) -> bool:
        """Return whether it is as many steps from the last hang to this one as from the one before to the last.

        Before the first hang comes the job's beginning: the first step is 0 or 1.
        """
        *_, last = self._hung_after or [step]
        return any(step - last == last - start > 0 for start in self._hung_after[-2:-1] or (-1, 0))

    def record_unclear_fault(self) -> None:
        """Record a fault that a GPU or a kernel of the script may have caused. The next one is blamed on the GPU."""
        self._unclear_faults += 1

    def record_restart(self, step: int, lived_s: float, *, hung: bool = False) -> None:
        """Record that the workers are started again.

        Args:
            step: The last step that any worker finished; -1 for none.
            lived_s: How long the workers had run, in seconds.
            hung: Whether they were killed because they hung.
        """
        if hung and step not in self._hung_after[-1:]:
            self._hung_after.append(step)
        self._fruitless = 0 if step > self._best_step or lived_s > _FRUITFUL_S else self._fruitless + 1
        self._best_step = max(self._best_step, step)


# --- The outcome of a generation on this node ---


_PEER_FAILURE_GRACE_S = 0.5
"""How long a traceback may come after the death of the peer that caused it.

With less, a lost peer would count as an error of the script, which ends the job; more delays the end of a job whose
script is wrong.
"""
_LEASE_GRACE_S = 1.0
"""How long, beyond a lease's length, other agents may need to see that a node is gone."""


class GenerationOutcome:
    """Collects exits and failures of a node's workers, one generation at a time."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._lease_s = spec.ttl_s
        self._failures: list[WorkerFailure] = []
        self._failed_at = 0.0
        self._ended_well: set[int] = set()
        self._restart_policy = RestartPolicy(spec.max_restarts)
        self._kernel_log = KernelLog()
        self._began_at = 0.0
        self._oom_kills: int | None = None
        self._leave_on_oom = spec.leave_on_oom
        self._killed_for_memory = False

    @property
    def failed(self) -> bool:
        """Whether a worker has failed."""
        return bool(self._failures)

    @property
    def ended_well(self) -> int:
        """How many workers have ended with exit code 0."""
        return len(self._ended_well)

    def clear_generation(self) -> None:
        """Clear the failures and exits of the previous generation."""
        if any(failure.cause in (ExitCause.UNCLEAR, ExitCause.MISSING) for failure in self._failures):
            self._restart_policy.record_unclear_fault()  # even if another node started over first because of it
        self._failures.clear()
        self._ended_well.clear()
        self._killed_for_memory = False

    def begin_generation(self, now: float) -> None:
        """Start measuring the workers' lifetime at `now` (`time.monotonic()`), and what the kernel logs and kills."""
        self._began_at = now
        self._oom_kills = cgroups.read_oom_kills()
        self._kernel_log.clear_xids()

    def record_exit(self, event: WorkerExit, rank: int, error_files: Mapping[int, Path]) -> None:
        """Record that a worker ended."""
        if event.status == 0:
            self._ended_well.add(rank)
        else:
            text = failures.read_error_file(error_files[event.local_rank])
            description = f"{event} (rank {rank})"
            if event.status == -signal.SIGKILL and self._count_oom_kills():
                description += ": there was too little memory, as its cgroup says"
            failure = WorkerFailure(rank, event.status, text, description)
            # When the process killed was one that loads data for a worker, the worker's own error only says so.
            by_kill = event.status == -signal.SIGKILL or (event.status > 0 and failure.cause is ExitCause.KILLED)
            self._killed_for_memory |= by_kill and bool(self._count_oom_kills())
            self.record_failure(failure)

    def record_lost_zygote(self, rank: int) -> None:
        """Record that the process that forks workers died, and all workers with it."""
        self._killed_for_memory |= bool(self._count_oom_kills())
        self.record_stuck_worker(rank, "the process that forks workers died")

    def _count_oom_kills(self) -> int | None:
        """Return how many processes the kernel killed for lack of memory in this generation; None if unknown."""
        now = cgroups.read_oom_kills()
        return None if now is None or self._oom_kills is None else now - self._oom_kills

    def record_stuck_worker(self, rank: int, description: str, number: int = signal.SIGKILL) -> None:
        """Record a worker that neither works nor ends, as if the signal `number` had killed it."""
        self.record_failure(WorkerFailure(rank, -number, "", description))

    def record_failure(self, failure: WorkerFailure) -> None:
        """Record that a worker failed."""
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)

    def decide_recovery(
        self,
        forgiven: int,
        others_ended: Collection[int],
        *,
        missing: bool,
        trained: bool,
        step: int,
        known_at: float = math.inf,
    ) -> RecoveryDecision | None:
        """Decide what follows from the failures.

        Args:
            forgiven: How many errors of the script itself the job has survived.
            others_ended: Ranks of other nodes that ended with exit code 0, which may explain lost contact.
            missing: Whether a node of the generation is gone or may be, which may explain it too.
            trained: Whether the job has trained before.
            step: The last step that any worker here finished; -1 if they report none.
            known_at: When `missing` and `others_ended` were read (`time.monotonic()`); infinity means now. Information
                from before this machine was paused says nothing about leases that have expired since.

        Returns:
            The decision; None if nothing has failed, or while the cause is not clear.
        """
        if not self._failures:
            return None
        ended = {*others_ended, *self._ended_well}
        decision = failures.decide_recovery(
            self._failures,
            min(known_at, time.monotonic()) - self._failed_at,
            error_grace_s=_PEER_FAILURE_GRACE_S,
            contact_timeout_s=_PEER_FAILURE_GRACE_S if ended else self._lease_s + _LEASE_GRACE_S,
            ended=ended,
            missing=missing,
            trained=trained,
            xids=self._kernel_log.read_xids(),
        )
        if decision is None:
            return None
        decision = replace(decision, oom_kills=self._count_oom_kills())
        if decision.restart and self._leave_on_oom and self._killed_for_memory and not decision.leave_out:
            return replace(decision, needs_memory=True)
        return self._restart_policy.apply_limits(decision, forgiven, step)

    def count_restart(self, step: int) -> None:
        """Count a restart that was carried out.

        `step` is the last that any worker finished before it; -1 if they report none.
        """
        hung = any(failure.description.startswith(HANGING) for failure in self._failures)
        lived_s = 0.0 if hung else time.monotonic() - self._began_at
        self._restart_policy.record_restart(step, lived_s, hung=hung)

    def close(self) -> None:
        """Stop reading the kernel's log."""
        self._kernel_log.close()
