"""This node's workers through the generations: started, kept or replaced, watched, and stopped.

An agent tells its workers when to pause through their status pages, and gives them a heartbeat. The heartbeat says that
this node may continue the job. An agent that was stopped for a while may have lost its place without knowing it, and
its threads resume in any order. So after that, the heartbeat resumes only once the records have been read.
"""

from __future__ import annotations

import logging
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from edl.background import BackgroundLoop
from edl.collective.agent.generation_outcome import HANGING, GenerationOutcome
from edl.collective.agent.health.failures import RecoveryDecision
from edl.collective.agent.health.hangs import HangDetector
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec, error_files, worker_forks
from edl.collective.agent.processes.pool import WorkerExit, WorkerProcesses, ZygoteLost
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.collective.job_records import World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage
from edl.errors import EDLError

__all__ = ["Heartbeat", "LogTee", "NodeStatusPages", "WorkerGroup", "pause_needs_s", "pause_step"]

logger = logging.getLogger(__name__)


_NOTICE_S: Final = 1.0
"""How far ahead the step is after which workers pause, in seconds.

Agents of other nodes learn of it by a watch, or by reading the records, which they do every second anyway. With less, a
worker may have passed the step. Training continues.
"""
_MIN_STEPS: Final = 2
"""Least number of steps ahead: a worker may already be in the step after the last one it reported."""
_PATIENCE_STEPS: Final = 6
"""How many usual steps may pass until all workers have paused; two of these normally come before the pause.

With fewer, a step that takes longer than most would be cut off; with more, nodes that join would wait longer for a rank
that hangs.
"""


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """Return a step far enough ahead that all workers see the request before they finish it.

    None if a worker reports no steps, or is not in this generation yet.
    """
    if any(status.step < 0 or status.generation != generation for status in statuses):
        return None
    step_s = _usual_step_s(statuses)
    ahead = math.ceil(_NOTICE_S / max(step_s if step_s is not None else _NOTICE_S, 1e-6))
    return max(status.step for status in statuses) + max(_MIN_STEPS, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """Return how many seconds the steps until a pause may take if steps are long; 0 if no step was measured."""
    step_s = _usual_step_s(statuses)
    return _PATIENCE_STEPS * step_s if step_s is not None else 0.0


def _usual_step_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [duration_s for status in statuses for duration_s in status.durations_s]
    return statistics.median(durations) if durations else None


# --- The agent's heartbeat ---


_INTERVAL_S: Final = 0.2
"""Seconds between two beats. Several fit into a lease (1.5 s by default), so a late beat stops no worker."""


class Heartbeat:
    """Beats until `close`, while it is allowed to, even while the agent waits for the store.

    Args:
        stopped_s: Seconds without a turn of its thread after which this process counts as having been stopped.
        beat: Sends the beat, dated with the moment that it is called with (`time.monotonic()`). So a process that is
            stopped in the middle of a turn sends an old one when it continues.
        touch: Called equally often, even if beats are not allowed.
        wake: Called after this process was stopped, so that the records are read.
        clock: `time.monotonic`.
    """

    def __init__(
        self,
        stopped_s: float,
        beat: Callable[[float], object],
        touch: Callable[[], object],
        wake: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopped_s = max(stopped_s, 2 * _INTERVAL_S)
        self._beat = beat
        self._touch = touch
        self._wake = wake
        self._clock = clock
        self._allowed = (-math.inf, -math.inf)
        self._resumed_at = clock()
        self._turn_at = self._resumed_at
        self._loop = BackgroundLoop("edl-heartbeat", self._turn)

    def allow_beats(self, asked_at: float, until: float) -> None:
        """Allow beats, because the job's records let the workers continue.

        Args:
            asked_at: When the records were requested (`time.monotonic()`).
            until: When beats end unless the records are read again (`time.monotonic()`).
        """
        self._allowed = asked_at, until

    def close(self) -> None:
        """Stop beating."""
        self._loop.close()

    def _turn(self) -> float:
        now = self._clock()
        if now - self._turn_at > self._stopped_s:
            self._resumed_at = now
            self._wake()
        self._turn_at = now
        self._touch()
        asked_at, until = self._allowed
        if asked_at >= self._resumed_at and now < until:
            self._beat(now)
        return _INTERVAL_S


# --- The status pages of all workers of a node ---


class NodeStatusPages:
    """The workers' status pages, from now until the host's folder is removed."""

    def __init__(self, host: HostFolder, workers: int) -> None:
        self._pages = {rank: WorkerStatusPage.create(host.status_page(rank)) for rank in range(workers)}

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """Return the workers' statuses by local rank."""
        return {rank: page.read_status() for rank, page in self._pages.items()}

    def record_agent_heartbeat(self, at: float) -> None:
        """Tell the workers that their agent was alive at this moment (`time.monotonic()`)."""
        for page in self._pages.values():
            page.record_agent_heartbeat(at)

    def request_pause(self, step: int | None) -> None:
        """Ask all workers to pause after `step`; None withdraws the request."""
        for page in self._pages.values():
            page.request_pause(step)

    def have_paused(self, generation: int) -> bool:
        """Return whether all workers have paused in a generation."""
        statuses = self.read_statuses().values()
        return all(status.paused >= 0 and status.generation == generation for status in statuses)

    def report_steps(self, generation: int) -> bool:
        """Return whether any worker has reported a finished step in a generation."""
        statuses = self.read_statuses().values()
        return any(status.step >= 0 and status.generation == generation for status in statuses)

    def choose_pause_step(self, generation: int) -> int | None:
        """Return a step that no worker has finished and that all can still be told of; None if they report no steps."""
        return pause_step(self.read_statuses().values(), generation)

    def pause_needs_s(self) -> float:
        """Return how many seconds the steps until a pause may take if steps are long."""
        return pause_needs_s(self.read_statuses().values())

    @property
    def last_step(self) -> int:
        """The last step that any worker finished; -1 if they report none."""
        return max(status.step for status in self.read_statuses().values())


# --- The workers' output ---


class LogTee:
    """Copies to the console what workers write into their files, one generation at a time."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._tails: list[Any] = []

    def follow_logs(self, logs: Any, first_rank: int) -> None:
        """Copy to the console what the workers write from now on, until `stop`."""
        for name, files, stream in (("stdout", logs.tee_stdouts, sys.stdout), ("stderr", logs.tee_stderrs, sys.stderr)):
            if files:
                prefixes = {rank: f"[{self._role}{first_rank + rank}]:" for rank in files}
                self._tails.append(TailLog(name, files, stream, log_line_prefixes=prefixes).start())

    def stop(self) -> None:
        """Copy what is left in the files, then stop."""
        for tail in self._tails:
            tail.stop()
        self._tails.clear()


# --- This node's workers through the generations ---


_STOPPED_S = 1.0
"""How long a worker may be stopped. A debugger stops and continues a process within it, while all ranks wait."""


class WorkerGroup:
    """The workers of a node. Used from the agent's thread only.

    Args:
        spec: This node's part of the job.
        host: The node's folder in memory.
        report: Called from another thread with every `WorkerExit` and `ZygoteLost`, for `handle_event`; with None if
            the job's records must be read before `allow_heartbeat` may be called again.
        raise_if_stopping: Called repeatedly during imports; may raise to end the wait.

    Attributes:
        generation: Generation of the workers that run here or ran last; -1 before the first.
        first_rank: Rank of the first of them.
        running: Whether workers were started and not stopped since.
        pages: Their status pages.
        hangs: Finds workers that hang.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        host: HostFolder,
        report: Callable[[WorkerExit | ZygoteLost | None], None],
        raise_if_stopping: Callable[[], object],
    ) -> None:
        self._spec = spec
        self._host = host
        self._report = report
        self._raise_if_stopping = raise_if_stopping
        self._pool = WorkerProcesses(spec.program, report)
        self._log_tee = LogTee(spec.role)
        self._error_files: dict[int, Path] = {}
        self._outcome = GenerationOutcome(spec)
        self._stopped_since: dict[int, float] = {}  # by process id
        self._began_at = 0.0
        self._prewarm_usable = True
        self._since_generation = 0
        self._terminated_at: float | None = None
        self.generation = -1
        self.first_rank = 0
        self.running = False
        self.pages = NodeStatusPages(host, spec.workers)
        self.hangs = HangDetector(spec.hang)
        self._heartbeat = Heartbeat(spec.ttl_s / 2, self.pages.record_agent_heartbeat, host.touch, lambda: report(None))

    # --- Starting and stopping ---

    def warm_up(self) -> str:
        """Get ready to fork, and return what could not be imported ahead of time, as text.

        Raises:
            EDLError: The process that forks workers died, or took too long.
        """
        self._pool.warm_up(raise_if_stopping=self._raise_if_stopping)
        return self._pool.import_failures

    def start_generation(self, world: World, position: int) -> None:
        """Replace the workers that ran here by those of a new generation.

        Raises:
            EDLError: Workers do not die, or cannot be forked.
        """
        member = world.nodes[position]
        if not self._prewarm_usable and self._pool.prewarmed:
            self._renew_pool()
        self._clear_generation()
        if self.generation < 0:
            self._since_generation = world.generation
            # Without a first heartbeat, a worker would not notice that later ones are missing.
            self.pages.record_agent_heartbeat(time.monotonic())
        self.generation = world.generation
        self.first_rank = member.first_rank
        forks, logs = worker_forks(self._spec, world, member, self._host, self._since_generation)
        self._error_files = error_files(logs)
        try:
            self._pool.replace_workers(world.generation, forks)
        except EDLError as exc:  # the zygote has died, with all its workers
            logger.warning("%s: another one imports what the script does first, which takes some seconds", exc)
            self._renew_pool()
            self._pool.fork_workers(world.generation, forks)
        self._log_tee.stop()
        self.running = True
        self._began_at = time.monotonic()
        self.hangs.begin_generation(self._began_at)
        self._outcome.begin_generation(self._began_at)
        self._log_tee.follow_logs(logs, self.first_rank)

    def stop_workers(self) -> None:
        """Stop the workers; their status pages and slots stay.

        Raises:
            EDLError: A worker does not die.
        """
        if self.running:
            self.running = False
            self._pool.kill_workers()
            self._log_tee.stop()
        self._clear_generation()

    def terminate_workers(self, number: int) -> bool:
        """Pass a signal on to the workers on the first call; later calls only check whether they have ended.

        Returns:
            Whether they have ended, or `LaunchSpec.grace_s` has passed; then call `stop_workers`.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._pool.send_signal(number)
        return not self._pool.running or now - self._terminated_at >= self._spec.grace_s

    @property
    def terminating(self) -> bool:
        """Whether the workers were asked to end, so that their exits have no consequences."""
        return self._terminated_at is not None

    def allow_heartbeat(self, asked_at: float, until: float) -> None:
        """Let the workers see that their agent is alive.

        Args:
            asked_at: When the job's records were requested that let the workers continue (`time.monotonic()`).
            until: Until when that is valid if the records cannot be read again (`time.monotonic()`).
        """
        self._heartbeat.allow_beats(asked_at, until)

    def close(self) -> None:
        """Stop everything."""
        self._pool.close()
        self._log_tee.stop()
        self._heartbeat.close()
        self._outcome.close()

    # --- What is known about them ---

    def handle_event(self, event: WorkerExit | ZygoteLost) -> None:
        """Record that one worker ended, or all of them."""
        if isinstance(event, ZygoteLost):
            self._outcome.record_lost_zygote(self.first_rank)
        elif event.generation == self.generation and self.running:
            self._outcome.record_exit(event, self.first_rank + event.local_rank, self._error_files)

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """Return the workers' statuses by local rank."""
        return self.pages.read_statuses()

    def dump_stacks(self) -> str:
        """Return what the workers are executing now, as text for a person."""
        return self._dump_stacks(self._pool.running, timeout_s=2.0)

    @property
    def failing(self) -> bool:
        """Whether a worker failed in this generation."""
        return self._outcome.failed and not self.terminating

    @property
    def finished(self) -> bool:
        """Whether all workers of this generation ended with exit code 0."""
        return self.running and not self.terminating and self._outcome.ended_well == self._spec.workers

    @property
    def paused(self) -> bool:
        """Whether all workers have paused."""
        return self.running and self.pages.have_paused(self.generation)

    @property
    def reports_steps(self) -> bool:
        """Whether any worker has reported a finished step."""
        return self.pages.report_steps(self.generation)

    def choose_pause_step(self) -> int | None:
        """Return a step far enough ahead that all workers see the request before they finish it, if there is one."""
        return self.pages.choose_pause_step(self.generation) if self.running else None

    def judge_failures(
        self,
        forgiven: int,
        others_ended: Collection[int] = (),
        *,
        missing: bool = False,
        known_at: float = math.inf,
    ) -> RecoveryDecision | None:
        """Decide what follows from the failures of this generation.

        Args:
            forgiven: How many errors of the script itself the job has survived.
            others_ended: Ranks of other nodes that ended with exit code 0, which may explain lost contact.
            missing: Whether a node of this generation is gone or may be, which may explain it too.
            known_at: When that was read (`time.monotonic()`); infinity means now.

        Returns:
            The decision; None if nothing has failed, or while the cause is not clear.
        """
        if not self.running or self.terminating:
            return None
        step = self.pages.last_step
        trained = self._since_generation > 0 or step >= 0
        return self._outcome.decide_recovery(
            forgiven, others_ended, missing=missing, trained=trained, step=step, known_at=known_at
        )

    def count_restart(self) -> None:
        """Count a restart that was carried out."""
        self._outcome.count_restart(self.pages.last_step)

    # --- Workers that neither work nor end ---

    def check_workers(self) -> None:
        """Find workers that neither work nor end, and record them as failed."""
        if not self.running or self.terminating:
            return
        running = self._pool.running
        statuses = self.read_statuses()
        for local_rank in self._find_stopped(running):
            rank = self.first_rank + local_rank
            description = f"worker {local_rank} (rank {rank}) was stopped"
            self._outcome.record_stuck_worker(rank, description, signal.SIGSTOP)
        if not self._outcome.failed:
            self._find_unbegun(running, statuses)
        if not self._outcome.failed and not self.finished:
            self._find_hung(running, statuses)

    def _find_stopped(self, running: dict[int, int]) -> list[int]:
        """Return the local ranks of workers that have been stopped (SIGSTOP) for a while and hold up all others."""
        now = time.monotonic()
        found = []
        for local_rank, pid in running.items():
            if not _is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                found.append(local_rank)
        return found

    def _find_unbegun(self, running: dict[int, int], statuses: dict[int, WorkerStatus]) -> None:
        """Find forks that never reach the script's first line, to replace them by workers that import everything.

        A fork has only one of its parent's threads. If another thread held a lock at that moment, the fork waits for it
        for ever.
        """
        limit_s = self._spec.hang.begin_s
        if self._spec.program.kind == "program" or time.monotonic() - self._began_at < limit_s:
            return
        unbegun = [rank for rank in running if statuses[rank].generation != self.generation]
        for local_rank in unbegun[:1]:
            rank = self.first_rank + local_rank
            what = f"worker {local_rank} (rank {rank}) did not come to the script's first line within {limit_s:g} s"
            logger.warning("%s: workers are no longer forked from a process that has imported anything", what)
            self._prewarm_usable = False
            self._outcome.record_stuck_worker(rank, what)

    def _find_hung(self, running: dict[int, int], statuses: dict[int, WorkerStatus]) -> None:
        """Record a worker as stuck if it is alive and makes no steps."""
        watched = {
            rank: (pid, statuses[rank]) for rank, pid in running.items() if statuses[rank].generation == self.generation
        }
        found = self.hangs.find_hung(watched, time.monotonic())
        if found is not None:
            rank = self.first_rank + found[0]
            self._outcome.record_stuck_worker(rank, f"{HANGING}: rank {rank}, {found[1]}")

    # --- Internals ---

    def _clear_generation(self) -> None:
        self._outcome.clear_generation()
        self._stopped_since.clear()

    def _renew_pool(self) -> None:
        """Start another process to fork workers from. It imports nothing if earlier forks did not reach the script."""
        self._pool.close()
        program = self._spec.program if self._prewarm_usable else replace(self._spec.program, prewarm=False)
        self._pool = WorkerProcesses(program, self._report)
        self._pool.warm_up(raise_if_stopping=self._raise_if_stopping)

    def _dump_stacks(self, processes: dict[int, int], *, timeout_s: float) -> str:
        ordered = sorted(processes.items())
        texts = dump_stacks([(pid, self._host.stacks(rank)) for rank, pid in ordered], timeout_s)
        return "\n".join(
            f"--- rank {self.first_rank + rank}, process {pid}:\n{text}"
            for (rank, pid), text in zip(ordered, texts, strict=True)
        )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
