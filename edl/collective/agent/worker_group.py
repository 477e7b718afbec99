"""This node's workers through the generations: started, kept or replaced, watched by their status pages, and judged."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from edl.collective.agent.health import failures
from edl.collective.agent.health.failure_policy import RestartPolicy
from edl.collective.agent.health.failures import ExitCause, RecoveryDecision, WorkerFailure
from edl.collective.agent.health.gpu_faults import KernelLog
from edl.collective.agent.health.hang_detector import HangDetector
from edl.collective.agent.health.heartbeat import Heartbeat
from edl.collective.agent.health.process_activity import read_queued_s
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec, error_files, worker_forks
from edl.collective.agent.membership import pause as pausing
from edl.collective.agent.processes.log_tee import LogTee
from edl.collective.agent.processes.pool import WorkerExit, WorkerPool, ZygoteLost
from edl.collective.agent.processes.regroup_timer import RegroupTimer
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.collective.job_records import World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage
from edl.errors import EDLError

__all__ = ["HANGING", "WorkerGroup"]

logger = logging.getLogger(__name__)

_ECHO_S = 0.5
_STOPPED_S = 1.0
_REGROUP_S = 2.0

HANGING = "the workers hang"
"""How the reason of a restart begins, before which every node shows the stacks of its workers."""


class WorkerGroup:
    """The workers of one node. Used from the agent's thread only.

    Args:
        spec: this node's part of the job.
        host: the node's folder in memory.
        report: called from another thread with each `WorkerExit` and `ZygoteLost`, for `handle_event`; with None
            when the job's records have to be looked at before `allow_heartbeat` can be called again.
        raise_if_stopping: called again and again while imports are waited for; may raise, to wait no longer.
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
        self._workers = WorkerPool(spec.warm, report)
        self._log_tee = LogTee(spec.role)
        self._status_pages = {rank: WorkerStatusPage.create(host.status_page(rank)) for rank in range(spec.workers)}
        self._errors: dict[int, Path] = {}
        self._failures: list[WorkerFailure] = []
        self._failed_at = 0.0
        self._ended_well: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self._regroup_timer = RegroupTimer(_REGROUP_S)
        self._restart_policy = RestartPolicy(spec.max_restarts)
        self._kernel_log = KernelLog()
        self._began_at = 0.0
        self.hangs = HangDetector(spec.hang)
        self._forks_begin = True
        self._since = 0
        self._terminated_at: float | None = None
        self.generation = -1
        """Of the workers that run here or ran last."""
        self.running = False
        self.first_rank = 0
        self._heartbeat = Heartbeat(spec.ttl_s / 2, self._beat, host.touch, lambda: report(None))

    # --- Starting and stopping. ---

    def warm_up(self) -> str:
        """Get ready to fork. Returns what could not be imported ahead of time, in words.

        Raises:
            EDLError: the process that forks workers died, or took too long.
        """
        self._workers.warm_up(raise_if_stopping=self._raise_if_stopping)
        return self._workers.import_failures

    def start_generation(self, world: World, position: int) -> None:
        """Run the workers of a new generation: keep those that can go on as they are, and fork the others."""
        member = world.nodes[position]
        if not self._forks_begin and self._workers.prewarmed:
            self._renew_workers()
        staying = self._staying()
        self._note_regrouped()
        self._forget()
        if self.generation < 0:
            self._since = world.generation
            self._beat()  # without a first sign of life nobody would miss the next ones
        self.generation, self.first_rank = world.generation, member.first_rank
        jobs, logs = worker_forks(self._spec, world, member, self._host, self._since)
        self._errors = error_files(logs)
        staying = {rank for rank in staying if _send(self._host.control(rank), jobs[rank].environ)}
        self._regroup_timer.expect_ranks(staying, time.monotonic())
        try:
            self._workers.replace_workers(
                world.generation, {rank: job for rank, job in jobs.items() if rank not in staying}
            )
        except EDLError as exc:  # the zygote has died, and with it all that it had forked
            logger.warning("%s: another one imports what the script does first, which takes some seconds", exc)
            self._renew_workers()
            self._workers.fork_workers(world.generation, jobs)
        self._log_tee.stop()
        self.running = True
        self._began_at = time.monotonic()
        self.hangs.begin_generation(self._began_at)
        self._kernel_log.clear_xids()
        self._log_tee.follow_logs(logs, self.first_rank)

    def stop_workers(self) -> None:
        """Stop the workers; their status pages and slots stay."""
        if self.running:
            self.running = False
            self._workers.kill_workers()
            self._log_tee.stop()
        self._forget()

    def terminate_workers(self, number: int) -> bool:
        """Pass a signal on to the workers, the first time; from then on only their end is waited for.

        Returns:
            Whether they have ended, or have had `LaunchSpec.grace_s` for it; then `stop_workers` is due.
        """
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._workers.send_signal(number)
        return not self._workers.running or now - self._terminated_at >= self._spec.grace_s

    @property
    def terminating(self) -> bool:
        """Whether the workers were asked to end, so that nothing follows from how they do."""
        return self._terminated_at is not None

    def allow_heartbeat(self, asked_at: float, until: float) -> None:
        """The job's records, asked for at `asked_at`, have the workers go on; `until` then if it is the last word."""
        self._heartbeat.allow_beats(asked_at, until)

    def close(self) -> None:
        """Stop everything."""
        self._workers.close()
        self._log_tee.stop()
        self._heartbeat.close()
        self._kernel_log.close()

    # --- What is heard of them. ---

    def handle_event(self, event: WorkerExit | ZygoteLost) -> None:
        """A worker or all of them ended."""
        if isinstance(event, ZygoteLost):
            self._fail(WorkerFailure(self.first_rank, -signal.SIGKILL, "", "the process that forks workers died"))
        elif event.generation == self.generation and self.running:
            rank = self.first_rank + event.local_rank
            if event.status == 0:
                self._ended_well.add(event.local_rank)
            else:
                text = failures.read_error_file(self._errors[event.local_rank])
                self._fail(WorkerFailure(rank, event.status, text, f"{event} (rank {rank})"))

    def check_workers(self) -> None:
        """Find workers that neither work nor end."""
        if not self.running or self.terminating:
            return
        self._look_for_stopped()
        self._look_for_regrouped()
        self._look_for_begun()
        self._look_for_hanging()

    def dump_stacks(self) -> str:
        """What the workers execute just now, for a person to read."""
        running = sorted(self._workers.running.items())
        texts = dump_stacks([(pid, self._host.stacks(rank)) for rank, pid in running])
        return "\n".join(
            f"--- rank {self.first_rank + rank}, process {pid}:\n{text}"
            for (rank, pid), text in zip(running, texts, strict=True)
        )

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """What the workers' status pages say, by local rank."""
        return {rank: page.read_status() for rank, page in self._status_pages.items()}

    @property
    def failing(self) -> bool:
        """Whether a worker failed in this generation."""
        return bool(self._failures) and not self.terminating

    @property
    def finished(self) -> bool:
        """Whether all workers of this generation ended well."""
        return self.running and not self.terminating and len(self._ended_well) == self._spec.workers

    @property
    def paused(self) -> bool:
        """Whether all workers have paused."""
        return self.running and all(
            status.paused >= 0 and status.generation == self.generation for status in self.read_statuses().values()
        )

    def request_pause(self, step: int | None) -> None:
        """Ask all workers to pause after `step`; None takes it back."""
        for page in self._status_pages.values():
            page.request_pause(step)

    @property
    def reports_steps(self) -> bool:
        """Whether any worker has said which step it has finished."""
        return any(
            status.step >= 0 and status.generation == self.generation for status in self.read_statuses().values()
        )

    def pause_step(self) -> int | None:
        """A step that no worker has finished and that all can still be told of; None if they report no steps."""
        return pausing.pause_step(self.read_statuses().values(), self.generation) if self.running else None

    def pause_needs_s(self) -> float:
        """How long the steps until a pause may take, where steps are long."""
        return pausing.pause_needs_s(self.read_statuses().values())

    def judge_failures(
        self, forgiven: int, others_ended: Collection[int] = (), *, missing: bool = False
    ) -> RecoveryDecision | None:
        """What follows from the failures of this generation; None while there are none, or the cause is not clear.

        Args:
            forgiven: how many errors of the script's own the job has gone on after.
            others_ended: ranks of other nodes that ended well, which may be why contact was lost.
            missing: a node of this generation is gone, which may be why as well.
        """
        if not self._failures or not self.running or self.terminating:
            return None
        waited_s = time.monotonic() - self._failed_at
        ended = {*others_ended, *(self.first_rank + rank for rank in self._ended_well)}
        contact_s = _ECHO_S if ended else self._spec.ttl_s + 1.0
        verdict = failures.decide_recovery(
            self._failures,
            waited_s,
            error_grace_s=_ECHO_S,
            contact_timeout_s=contact_s,
            ended=ended,
            missing=missing,
            trained=self._since > 0 or self.step >= 0,
            xids=self._kernel_log.read_xids(),
        )
        return self._restart_policy.apply_limits(verdict, forgiven, self.step) if verdict is not None else None

    def count_restart(self) -> None:
        """The verdict was carried out: count it."""
        hung = any(failure.description.startswith(HANGING) for failure in self._failures)
        lived_s = 0.0 if hung else time.monotonic() - self._began_at
        self._restart_policy.record_restart(self.step, lived_s)

    # --- Inside. ---

    def _forget(self) -> None:
        """What was heard of the last generation."""
        if any(failure.cause in (ExitCause.UNCLEAR, ExitCause.MISSING) for failure in self._failures):
            self._restart_policy.record_unclear_fault()  # whichever node was first to begin anew because of it
        self._failures.clear()
        self._ended_well.clear()
        self._stopped_since.clear()

    def _renew_workers(self) -> None:
        """Have another process to fork workers from; one that imports nothing where forks did not begin."""
        self._workers.close()
        warm = self._spec.warm if self._forks_begin else replace(self._spec.warm, prewarm=False)
        self._workers = WorkerPool(warm, self._report)
        self._workers.warm_up(raise_if_stopping=self._raise_if_stopping)

    def _beat(self) -> None:
        for page in self._status_pages.values():
            page.record_agent_heartbeat()

    @property
    def step(self) -> int:
        """The last step that any worker finished, -1 if they report none."""
        return max(status.step for status in self.read_statuses().values())

    def _fail(self, failure: WorkerFailure) -> None:
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)

    def _staying(self) -> set[int]:
        """The local ranks that go on in the next generation in the same process: all that can and did not fail."""
        if not self.running:
            return set()
        failed = {failure.rank - self.first_rank for failure in self._failures}
        return {
            rank
            for rank in self._workers.running
            if rank not in failed and self._status_pages[rank].read_status().in_process
        }

    def _look_for_stopped(self) -> None:
        """A worker that somebody stopped (SIGSTOP) holds up all others: after a moment it is taken for lost."""
        now = time.monotonic()
        for local_rank, pid in self._workers.running.items():
            if not _is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                rank = self.first_rank + local_rank
                what = f"worker {local_rank} (rank {rank}) was stopped"
                self._fail(WorkerFailure(rank, -signal.SIGSTOP, "", what))

    def _look_for_begun(self) -> None:
        """Replace forks that never get to the first line of the script by processes that import everything themselves.

        A fork has none of its parent's other threads. If one of them held a lock at that moment, the fork waits for it.
        """
        limit_s = self._spec.hang.begin_s
        if self._failures or self._spec.warm.kind == "program" or time.monotonic() - self._began_at < limit_s:
            return
        for local_rank in self._workers.running:
            if self._status_pages[local_rank].read_status().generation != self.generation:
                rank = self.first_rank + local_rank
                what = f"worker {local_rank} (rank {rank}) did not come to the script's first line within {limit_s:g} s"
                logger.warning("%s: workers are no longer forked from a process that has imported anything", what)
                self._forks_begin = False
                self._fail(WorkerFailure(rank, -signal.SIGKILL, "", what))
                return

    def _look_for_hanging(self) -> None:
        """Find workers that are alive and make no step."""
        if self._failures or self.finished:
            return
        statuses = self.read_statuses()
        watched = {
            rank: (pid, statuses[rank])
            for rank, pid in self._workers.running.items()
            if statuses[rank].generation == self.generation
        }
        found = self.hangs.find_hung(watched, time.monotonic())
        if found is not None:
            rank = self.first_rank + found[0]
            self._fail(WorkerFailure(rank, -signal.SIGKILL, "", f"{HANGING}: rank {rank}, {found[1]}"))

    def _look_for_regrouped(self) -> None:
        """Workers that stayed and have not come to the next generation in time make way for new ones."""
        self._note_regrouped()
        running = self._workers.running
        late = self._regroup_timer.find_late(time.monotonic(), lambda rank: read_queued_s(running.get(rank, 0)))
        if late and not self._failures:
            what = f"worker {late[0]} took more than {_REGROUP_S:g} s to go on in process"
            self._fail(WorkerFailure(self.first_rank + late[0], -signal.SIGKILL, "", what))

    def _note_regrouped(self) -> None:
        for rank in self._regroup_timer.awaited_ranks:
            if self._status_pages[rank].read_status().generation == self.generation:
                self._regroup_timer.record_arrival(rank)


def _send(control: Path, environ: Mapping[str, str]) -> bool:
    """Tell a worker that stays of the generation that it belongs to from now on. False if it does not listen."""
    try:
        pipe = os.open(control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(pipe, json.dumps(dict(environ)).encode() + b"\n") > 0
    except OSError:
        return False
    finally:
        os.close(pipe)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
