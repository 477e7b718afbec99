"""This node's workers through the generations: started, kept or replaced, watched, and stopped.

An agent tells its workers by their status pages when to pause, and gives them a heartbeat. An agent that was stopped
for a while may have lost its place in the job without knowing it. Its threads go on in any order, so the heartbeat,
which says that the job is still this node's to go on with, is not given again before the records have been looked at.
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
"""So far ahead is the step after which workers pause. Agents of other nodes learn of it by a watch, or within the
second after which they read the records anyway: with less, a worker may have passed the step. Training goes on."""
_MIN_STEPS: Final = 2
"""A worker may be in the step after its last reported one already."""
_PATIENCE_STEPS: Final = 6
"""So many usual steps may pass until all workers have paused, of which two are ahead of the pause as a rule: fewer
would cut off a step that takes longer than most, more would make nodes that join wait for a rank that hangs."""


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """Return a step so far ahead that all workers see the request before they finish it.

    Returns:
        The step; None if a worker reports no steps, or is not in this generation yet.
    """
    if any(status.step < 0 or status.generation != generation for status in statuses):
        return None
    step_s = _usual_step_s(statuses)
    ahead = math.ceil(_NOTICE_S / max(step_s if step_s is not None else _NOTICE_S, 1e-6))
    return max(status.step for status in statuses) + max(_MIN_STEPS, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """Return how many seconds the steps until a pause may take, where steps are long; 0 if no step was measured."""
    step_s = _usual_step_s(statuses)
    return _PATIENCE_STEPS * step_s if step_s is not None else 0.0


def _usual_step_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [duration_s for status in statuses for duration_s in status.durations_s]
    return statistics.median(durations) if durations else None


# --- The sign of life that an agent gives its workers ---


_INTERVAL_S: Final = 0.2
"""Between two beats: several fit into a lease (1.5 s unless set otherwise), so a beat that is late stops no worker."""


class Heartbeat:
    """Beats from now until `close`, as long as it may; also while the agent waits for the store.

    Args:
        stopped_s: after that many seconds without a turn of its thread this process counts as having been stopped.
        beat: gives the sign, which is of the moment it is called with (`time.monotonic()`): a process that is stopped
            in the middle of a turn gives an old one when it goes on.
        touch: called as often, also when the sign may not be given.
        wake: called when this process was stopped, so that the records are looked at.
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
        """Allow beats, since the job's records have the workers go on.

        Args:
            asked_at: when the records were asked for (`time.monotonic()`).
            until: when beats end if nothing more is heard of the records (`time.monotonic()`).
        """
        self._allowed = asked_at, until

    def close(self) -> None:
        """End the beats."""
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


# --- The status pages of all workers of a node, read and written together ---


class NodeStatusPages:
    """The workers' pages of shared memory, from now until the host's folder is removed."""

    def __init__(self, host: HostFolder, workers: int) -> None:
        self._pages = {rank: WorkerStatusPage.create(host.status_page(rank)) for rank in range(workers)}

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """Return what the pages say, by local rank."""
        return {rank: page.read_status() for rank, page in self._pages.items()}

    def record_agent_heartbeat(self, at: float) -> None:
        """Show the workers that their agent lived at this moment (`time.monotonic()`)."""
        for page in self._pages.values():
            page.record_agent_heartbeat(at)

    def request_pause(self, step: int | None) -> None:
        """Ask all workers to pause after `step`; None takes it back."""
        for page in self._pages.values():
            page.request_pause(step)

    def have_paused(self, generation: int) -> bool:
        """Return whether all workers have paused in a generation."""
        statuses = self.read_statuses().values()
        return all(status.paused >= 0 and status.generation == generation for status in statuses)

    def report_steps(self, generation: int) -> bool:
        """Return whether any worker has said in a generation which step it has finished."""
        statuses = self.read_statuses().values()
        return any(status.step >= 0 and status.generation == generation for status in statuses)

    def choose_pause_step(self, generation: int) -> int | None:
        """Return a step that no worker has finished and that all can still be told of; None if they report no steps."""
        return pause_step(self.read_statuses().values(), generation)

    def pause_needs_s(self) -> float:
        """Return how many seconds the steps until a pause may take, where steps are long."""
        return pause_needs_s(self.read_statuses().values())

    @property
    def last_step(self) -> int:
        """The last step that any worker finished, -1 if they report none."""
        return max(status.step for status in self.read_statuses().values())


# --- This node's workers through the generations ---


class LogTee:
    """Copies what workers write into their files, a generation at a time."""

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
        """Copy what is left in the files, and no more."""
        for tail in self._tails:
            tail.stop()
        self._tails.clear()


# --- This node's workers through the generations ---


_STOPPED_S = 1.0
"""How long a worker may be stopped: a debugger stops and continues a process within it, and all ranks wait for it."""


class WorkerGroup:
    """The workers of a node. Used from the agent's thread only.

    Args:
        spec: this node's part of the job.
        host: the node's folder in memory.
        report: called from another thread with every `WorkerExit` and `ZygoteLost`, for `handle_event`; with None
            when the job's records have to be looked at before `allow_heartbeat` can be called again.
        raise_if_stopping: called again and again while imports are waited for; may raise, to wait no longer.

    Attributes:
        generation: of the workers that run here or ran last, -1 before the first.
        first_rank: the rank of the first of them.
        running: whether workers were started and not stopped since.
        pages: their status pages.
        hangs: finds workers that hang.
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

    # --- Starting and stopping. ---

    def warm_up(self) -> str:
        """Get ready to fork.

        Returns:
            What could not be imported ahead of time, in words.

        Raises:
            EDLError: the process that forks workers died, or took too long.
        """
        self._pool.warm_up(raise_if_stopping=self._raise_if_stopping)
        return self._pool.import_failures

    def start_generation(self, world: World, position: int) -> None:
        """Run the workers of a new generation in the place of those that ran here.

        Raises:
            EDLError: workers do not die, or cannot be forked.
        """
        member = world.nodes[position]
        if not self._prewarm_usable and self._pool.prewarmed:
            self._renew_pool()
        self._clear_generation()
        if self.generation < 0:
            self._since_generation = world.generation
            # Without a first sign of life the next ones would not be missed.
            self.pages.record_agent_heartbeat(time.monotonic())
        self.generation = world.generation
        self.first_rank = member.first_rank
        forks, logs = worker_forks(self._spec, world, member, self._host, self._since_generation)
        self._error_files = error_files(logs)
        try:
            self._pool.replace_workers(world.generation, forks)
        except EDLError as exc:  # the zygote has died, and with it all that it had forked
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
            EDLError: a worker does not die.
        """
        if self.running:
            self.running = False
            self._pool.kill_workers()
            self._log_tee.stop()
        self._clear_generation()

    def terminate_workers(self, number: int) -> bool:
        """Pass a signal on to the workers, the first time; from then on only their end is waited for.

        Returns:
            Whether they have ended, or have had `LaunchSpec.grace_s` for it; then `stop_workers` is due.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._pool.send_signal(number)
        return not self._pool.running or now - self._terminated_at >= self._spec.grace_s

    @property
    def terminating(self) -> bool:
        """Whether the workers were asked to end, so that nothing follows from how they do."""
        return self._terminated_at is not None

    def allow_heartbeat(self, asked_at: float, until: float) -> None:
        """Let the workers see that their agent lives.

        Args:
            asked_at: when the job's records were asked for, which have the workers go on (`time.monotonic()`).
            until: until when that holds if the records cannot be read again.
        """
        self._heartbeat.allow_beats(asked_at, until)

    def close(self) -> None:
        """Stop everything."""
        self._pool.close()
        self._log_tee.stop()
        self._heartbeat.close()
        self._outcome.close()

    # --- What is known of them. ---

    def handle_event(self, event: WorkerExit | ZygoteLost) -> None:
        """Record that a worker ended, or all of them."""
        if isinstance(event, ZygoteLost):
            self._outcome.record_lost_zygote(self.first_rank)
        elif event.generation == self.generation and self.running:
            self._outcome.record_exit(event, self.first_rank + event.local_rank, self._error_files)

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """Return what the workers' status pages say, by local rank."""
        return self.pages.read_statuses()

    def dump_stacks(self) -> str:
        """Return what the workers execute just now, for a person to read."""
        return self._dump_stacks(self._pool.running, timeout_s=2.0)

    @property
    def failing(self) -> bool:
        """Whether a worker failed in this generation."""
        return self._outcome.failed and not self.terminating

    @property
    def finished(self) -> bool:
        """Whether all workers of this generation ended well."""
        return self.running and not self.terminating and self._outcome.ended_well == self._spec.workers

    @property
    def paused(self) -> bool:
        """Whether all workers have paused."""
        return self.running and self.pages.have_paused(self.generation)

    @property
    def reports_steps(self) -> bool:
        """Whether any worker has said which step it has finished."""
        return self.pages.report_steps(self.generation)

    def choose_pause_step(self) -> int | None:
        """Return a step so far ahead that all workers see the request before they finish it; None if there is none."""
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
            forgiven: after how many errors of the script's own the job has gone on.
            others_ended: ranks of other nodes that ended well, which may be why contact was lost.
            missing: whether a node of this generation is gone, or may be, which may be why as well.
            known_at: when that was known of the other nodes (`time.monotonic()`), infinity for now.

        Returns:
            What follows; None while nothing has failed, or the cause is not clear.
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

    # --- Workers that neither work nor end. ---

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
        """Return the local ranks of workers that have been stopped (SIGSTOP) for a while, and hold up all others."""
        now = time.monotonic()
        found = []
        for local_rank, pid in running.items():
            if not _is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                found.append(local_rank)
        return found

    def _find_unbegun(self, running: dict[int, int], statuses: dict[int, WorkerStatus]) -> None:
        """Have forks that never get to the script's first line replaced by processes that import everything themselves.

        A fork has none of its parent's other threads. If one of them held a lock at that moment, the fork waits for it.
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
        """Have workers replaced that are alive and make no step."""
        watched = {
            rank: (pid, statuses[rank]) for rank, pid in running.items() if statuses[rank].generation == self.generation
        }
        found = self.hangs.find_hung(watched, time.monotonic())
        if found is not None:
            rank = self.first_rank + found[0]
            self._outcome.record_stuck_worker(rank, f"{HANGING}: rank {rank}, {found[1]}")

    # --- Inside. ---

    def _clear_generation(self) -> None:
        self._outcome.clear_generation()
        self._stopped_since.clear()

    def _renew_pool(self) -> None:
        """Have another process to fork workers from; it imports nothing where forks did not begin."""
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
