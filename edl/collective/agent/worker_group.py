"""Manages this node's workers from generation to generation: starts, keeps, replaces, watches and stops them.

Through their status pages, an agent tells its workers when to pause and gives them a heartbeat, which says that this
node may continue the job. An agent that was stopped for a while may not know that it has lost its place in the job, and
its threads resume in any order. So after a stop, the heartbeat resumes only once the agent has read the records.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from edl.background import BackgroundLoop
from edl.collective.agent.health.failures import HANGING, GenerationOutcome, Progress, RecoveryDecision
from edl.collective.agent.health.hangs import HangDetector
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec, has_gpu_build
from edl.collective.agent.processes.pool import WorkerExit, WorkerProcesses, ZygoteLost, read_stat
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.collective.agent.processes.zygote import ForkRequest
from edl.collective.job_records import Member, World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage
from edl.errors import EDLError

logger = logging.getLogger(__name__)


_NOTICE_S: Final = 1.0  # how far ahead the step of a pause is: agents of other nodes learn of it within a second
_MIN_STEPS: Final = 2  # a worker may already be in the step after the last one it reported
_PATIENCE_STEPS: Final = 6  # usual steps until all workers have paused; two normally come before the pause


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """Return a step late enough to tell all workers first, or None if a worker reports no step in this generation."""
    if any(status.step < 0 or status.generation != generation for status in statuses):
        return None
    step_s = _usual_step_s(statuses)
    ahead = math.ceil(_NOTICE_S / max(step_s if step_s is not None else _NOTICE_S, 1e-6))
    return max(status.step for status in statuses) + max(_MIN_STEPS, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """Return how many seconds the steps before a pause may take; 0 if no step was measured."""
    step_s = _usual_step_s(statuses)
    return _PATIENCE_STEPS * step_s if step_s is not None else 0.0


def _usual_step_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [duration_s for status in statuses for duration_s in status.durations_s]
    return statistics.median(durations) if durations else None


_INTERVAL_S: Final = 0.2  # between two beats: several fit into a lease, so a late beat stops no worker


class Heartbeat:
    """Beats until `close`, as long as `allow_beats` permits, even while the agent waits for the store.

    `beat` is called with the time to record, so a process that was stopped during a turn records an old time. If the
    heartbeat's thread takes no turn for `stopped_s` seconds, this process counts as having been stopped, and `wake`
    makes the agent read the records.
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
        """Allow beats before `until`, because the records requested at `asked_at` let the workers continue."""
        self._allowed = asked_at, until

    def close(self) -> None:
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


# --- The environment of a worker: torchrun's variables, Paddle's, and EDL's own ---


def worker_environment(spec: LaunchSpec, world: World, member: Member, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker, with the generation as the restart count."""
    rank = member.first_rank + local_rank
    first = world.nodes[0]
    paddle = spec.framework == "paddle"
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(world.position(member.id)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(member.local_world_size),
        "WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(len(world.nodes)),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": first.addr,
        "MASTER_PORT": str(first.port),
        "TORCHELASTIC_RESTART_COUNT": str(world.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "EDL_GENERATION": str(world.generation),
        **(paddle_environment(world, member, local_rank, gpu=has_gpu_build()) if paddle else {}),
        **_threads(world, member),
        **spec.environ,
    }


def paddle_environment(world: World, member: Member, local_rank: int, *, gpu: bool = False) -> dict[str, str]:
    """Return the variables that `paddle.distributed.launch` sets for a trainer: for a GPU if `gpu`, else for gloo."""
    rank = member.first_rank + local_rank
    endpoints = [
        f"{node.addr}:{node.port + 1 + place}" for node in world.nodes for place in range(node.local_world_size)
    ]
    first = world.nodes[0]
    return {
        "PADDLE_MASTER": f"{first.addr}:{first.port}",
        "MASTER_ADDR": first.addr,  # Paddle reads it first
        "MASTER_PORT": str(first.port),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world.size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(world.size),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(member.local_world_size),
        "PADDLE_NNODES": str(len(world.nodes)),
        **({"FLAGS_selected_gpus": str(local_rank)} if gpu else {"PADDLE_DISTRI_BACKEND": "gloo"}),
    }


def _threads(world: World, member: Member) -> dict[str, str]:
    """Divide a host's cores among its nodes' workers. OpenMP busy-waits: twice the threads took ten times as long."""
    here = sum(node.local_world_size for node in world.nodes if node.addr == member.addr)
    if here == member.local_world_size or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // here))}


def worker_forks(
    spec: LaunchSpec, world: World, member: Member, host: HostFolder, logs: LogsSpecs, since: int = 0
) -> tuple[dict[int, ForkRequest], LogsDest]:
    environs = {rank: worker_environment(spec, world, member, rank) for rank in range(spec.workers)}
    files = logs.reify(environs)
    result = {}
    for local_rank, environ in environs.items():
        environ["EDL_BOARD"] = str(host.status_page(local_rank))
        environ["EDL_SLOTS"] = host.slots(local_rank)
        environ["EDL_REPLICAS"] = str(host.replicas)
        environ["EDL_RUN"] = host.run
        environ["EDL_SINCE_GENERATION"] = str(since)
        if world.message.startswith(HANGING):
            environ["EDL_AFTER_HANG"] = "1"
        if spec.checkpoint:
            environ["EDL_CHECKPOINT"] = spec.checkpoint
            environ["EDL_CHECKPOINT_INTERVAL_S"] = str(spec.checkpoint_interval_s)
        environ["EDL_STDOUT"] = files.stdouts.get(local_rank, "")
        environ["EDL_STDERR"] = files.stderrs.get(local_rank, "")
        environ["TORCHELASTIC_ERROR_FILE"] = files.error_files[local_rank]
        result[local_rank] = ForkRequest(environ, stacks=str(host.stacks(local_rank)))
    return result, files


_STOPPED_S: Final = 1.0  # how long a worker may be stopped: a debugger stops a process within it, while all ranks wait


class WorkerGroup:
    """The workers of a node. Used from the agent's thread only.

    Other threads call `report` with every `WorkerExit` and `ZygoteLost`, which the agent passes to `handle_event`, and
    with None if the agent must read the job's records before `heartbeat` may go on. `generation` is the generation of
    the workers that run here, or of the last workers that ran here.
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
        self._logs = spec.logs(str(host.make_output_folder()))
        self._log_tails: list[TailLog] = []
        self._error_files: dict[int, Path] = {}
        self._outcome = GenerationOutcome(spec.ttl_s, spec.max_restarts, leave_on_oom=spec.leave_on_oom)
        self._stopped_since: dict[int, float] = {}  # by process id
        self._began_at = 0.0
        self._prewarm_usable = True
        self._since_generation = 0
        self._terminated_at: float | None = None
        self.generation = -1
        self.first_rank = 0
        self.running = False
        self._pages = [WorkerStatusPage.create(host.status_page(rank)) for rank in range(spec.workers)]
        self.hangs = HangDetector(spec.hang)
        self.heartbeat = Heartbeat(spec.ttl_s / 2, self._record_heartbeat, host.touch, lambda: report(None))

    def warm_up(self) -> str:
        """Get ready to fork, and return, as text, what could not be imported ahead of time."""
        self._pool.warm_up(raise_if_stopping=self._raise_if_stopping)
        return self._pool.import_failures

    def start_generation(self, world: World, position: int) -> None:
        member = world.nodes[position]
        if not self._prewarm_usable and self._pool.prewarmed:
            self._renew_pool()
        self._clear_generation()
        if self.generation < 0:
            self._since_generation = world.generation
            # Without a first heartbeat, a worker would not notice that later ones are missing.
            self._record_heartbeat(time.monotonic())
        self.generation = world.generation
        self.first_rank = member.first_rank
        forks, logs = worker_forks(self._spec, world, member, self._host, self._logs, self._since_generation)
        self._error_files = {rank: Path(path) for rank, path in logs.error_files.items()}
        try:
            self._pool.replace_workers(world.generation, forks)
        except EDLError as exc:  # the zygote has died, with all its workers
            logger.warning("%s: starting another one, which repeats the script's first imports (some seconds)", exc)
            self._renew_pool()
            self._pool.fork_workers(world.generation, forks)
        self._stop_log_tails()
        self.running = True
        self._began_at = time.monotonic()
        self.hangs.begin_generation(self._began_at)
        self._outcome.begin_generation(self._began_at, alone=world.size == 1)
        self._tail_logs(logs)

    def stop_workers(self) -> None:
        """Stop the workers; their status pages and slots stay."""
        if self.running:
            self.running = False
            self._pool.kill_workers()
            self._stop_log_tails()
        self._clear_generation()

    def terminate_workers(self, number: int) -> bool:
        """Pass a signal on to the workers on the first call. Returns whether they have ended or their time is up."""
        now = time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = now
            self._pool.send_signal(number)
        return not self._pool.running or now - self._terminated_at >= self._spec.grace_s

    @property
    def terminating(self) -> bool:
        """Whether the workers were asked to end. Their exits then have no consequences."""
        return self._terminated_at is not None

    def close(self) -> None:
        self._pool.close()
        self._stop_log_tails()
        self.heartbeat.close()

    def handle_event(self, event: WorkerExit | ZygoteLost) -> None:
        if isinstance(event, ZygoteLost):
            self._outcome.record_lost_zygote(self.first_rank)
        elif event.generation == self.generation and self.running:
            rank = self.first_rank + event.local_rank
            self._outcome.record_exit(rank, event.status, f"{event} (rank {rank})", self._error_files[event.local_rank])

    def read_statuses(self) -> list[WorkerStatus]:
        return [page.read_status() for page in self._pages]

    @property
    def last_step(self) -> int:
        """The last step that any worker finished; -1 if no worker reported a step."""
        return max(status.step for status in self.read_statuses())

    def dump_stacks(self) -> str:
        ordered = sorted(self._pool.running.items())
        texts = dump_stacks([(pid, self._host.stacks(rank)) for rank, pid in ordered])
        return "\n".join(
            f"--- rank {self.first_rank + rank}, process {pid}:\n{text}"
            for (rank, pid), text in zip(ordered, texts, strict=True)
        )

    @property
    def failing(self) -> bool:
        return self._outcome.failed and not self.terminating

    @property
    def finished(self) -> bool:
        return self.running and not self.terminating and self._outcome.ended_well == self._spec.workers

    @property
    def paused(self) -> bool:
        return self.running and all(
            status.paused >= 0 and status.generation == self.generation for status in self.read_statuses()
        )

    @property
    def reports_steps(self) -> bool:
        return any(status.step >= 0 and status.generation == self.generation for status in self.read_statuses())

    def request_pause(self, step: int | None) -> None:
        """Ask all workers to pause after `step`; None withdraws the request."""
        for page in self._pages:
            page.request_pause(step)

    def judge_failures(
        self, forgiven: int, others_ended: Collection[int] = (), *, missing: bool = False, known_at: float = math.inf
    ) -> RecoveryDecision | None:
        if not self.running or self.terminating:
            return None
        progress = self._progress()
        trained = self._since_generation > 0 or progress.step >= 0
        return self._outcome.decide_recovery(
            forgiven, others_ended, missing=missing, trained=trained, progress=progress, known_at=known_at
        )

    def count_restart(self) -> None:
        self._outcome.count_restart(self._progress())

    def _progress(self) -> Progress:
        return Progress(self.last_step, sum(status.finished for status in self.read_statuses()))

    def check_workers(self) -> None:
        if not self.running or self.terminating:
            return
        running = self._pool.running
        now = time.monotonic()  # taken before the statuses, which age if this agent is held up
        statuses = self.read_statuses()
        for local_rank in self._find_stopped(running):
            rank = self.first_rank + local_rank
            description = f"worker {local_rank} (rank {rank}) was stopped"
            self._outcome.record_stuck_worker(rank, description, signal.SIGSTOP)
        if not self._outcome.failed:
            self._find_unbegun(running, statuses)
        if not self._outcome.failed and not self.finished:
            self._find_hung(running, statuses, now)

    def _find_stopped(self, running: dict[int, int]) -> list[int]:
        """Return the local ranks of workers that have been stopped (SIGSTOP) for a while and hold up all others."""
        now = time.monotonic()
        found = []
        for local_rank, pid in running.items():
            if read_stat(pid)[:1] != ["T"]:
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                found.append(local_rank)
        return found

    def _find_unbegun(self, running: dict[int, int], statuses: list[WorkerStatus]) -> None:
        """Record a worker that never begins, because its fork waits for a lock that a thread of its parent held."""
        limit_s = self._spec.hang.begin_s
        if self._spec.program.kind == "program" or time.monotonic() - self._began_at < limit_s:
            return
        unbegun = [rank for rank in running if statuses[rank].generation != self.generation]
        for local_rank in unbegun[:1]:
            rank = self.first_rank + local_rank
            what = f"worker {local_rank} (rank {rank}) did not reach the script's first line within {limit_s:g} s"
            logger.warning("%s: from now on, each worker imports everything itself", what)
            self._prewarm_usable = False
            self._outcome.record_stuck_worker(rank, what)

    def _find_hung(self, running: dict[int, int], statuses: list[WorkerStatus], now: float) -> None:
        watched = {
            rank: (pid, statuses[rank]) for rank, pid in running.items() if statuses[rank].generation == self.generation
        }
        found = self.hangs.find_hung(watched, now)
        if found is not None:
            rank = self.first_rank + found[0]
            self._outcome.record_stuck_worker(rank, f"{HANGING}: rank {rank}, {found[1]}")

    def _clear_generation(self) -> None:
        self._outcome.clear_generation()
        self._stopped_since.clear()

    def _renew_pool(self) -> None:
        """Start another process to fork workers from. It imports nothing if earlier forks did not reach the script."""
        self._pool.close()
        program = self._spec.program if self._prewarm_usable else replace(self._spec.program, prewarm=False)
        self._pool = WorkerProcesses(program, self._report)
        self._pool.warm_up(raise_if_stopping=self._raise_if_stopping)

    def _record_heartbeat(self, at: float) -> None:
        for page in self._pages:
            page.record_agent_heartbeat(at)

    def _tail_logs(self, logs: LogsDest) -> None:
        """Copy to the console what the workers write into their files from now on."""
        for name, files, stream in (("stdout", logs.tee_stdouts, sys.stdout), ("stderr", logs.tee_stderrs, sys.stderr)):
            if files:
                prefixes = {rank: f"[{self._spec.role}{self.first_rank + rank}]:" for rank in files}
                self._log_tails.append(TailLog(name, files, stream, log_line_prefixes=prefixes).start())

    def _stop_log_tails(self) -> None:
        for tail in self._log_tails:
            tail.stop()
        self._log_tails.clear()
