"""Decides why workers ended and what to do: an error in the script, a machine's fault, or lost contact with a rank.

CUDA's reference says what causes each error (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html).
"device-side assert triggered" and "out of memory" are missing here on purpose: they are errors of the script.
"""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from edl import cgroups

# Exceptions begin in the first column. A traceback's source lines are indented, and prove nothing.
_SAID_BY: Final = r"(?:CUDA|HIP)(?: driver)? (?:error|failure)(?: ?\(?\d+\)?)?[:,]?[ ']+"
_HARDWARE: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:uncorrectable ECC error|uncorrectable NVLink error"
    r"|Invalid access of peer GPU memory over nvlink or a hardware error)|\bGPU is lost\b|fallen off the bus).*$",
    re.IGNORECASE | re.MULTILINE,
)
_UNCLEAR: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:unspecified launch failure|an illegal memory access|misaligned address"
    r"|an illegal instruction|invalid program counter|hardware stack error"
    r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR))|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)).*$",
    re.IGNORECASE | re.MULTILINE,
)
_MISSING: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:no CUDA-capable device|invalid device ordinal|CUDA-capable device\(s\) is/are busy"
    r"|initialization error|system not yet initialized|unknown error)|No CUDA GPUs are available"
    r"|CUDA driver initialization failed|CUDA unknown error).*$",
    re.IGNORECASE | re.MULTILINE,
)
_MISUSE: Final = re.compile(r"\bnccl(?:InvalidUsage|InvalidArgument)\b")


class ExitCause(Enum):
    """Why a worker failed."""

    KILLED = "killed"  # by a signal, or a process that loads its data was: memory, preemption
    CRASHED = "crashed"  # in native code, which sent the signal itself, such as SIGSEGV
    PEER_LOST = "contact"  # with another rank, where the cause is; Paddle's gloo and NCCL's watchdog use SIGABRT
    ERROR = "error"  # the script raised (a failed assertion in a kernel counts too), or ended with a nonzero exit code
    HARDWARE = "hardware"  # a GPU of the node is broken
    UNCLEAR = "unclear"  # a kernel made an illegal access or the like: either its own error, or the GPU's
    MISSING = "missing"  # the GPU does not exist: an error of the script, unless it existed before
    NO_TEACHER = "no_teacher"  # no teacher was live while the script waited (`edl.errors.NoTeacherError`)


def find_gpu_fault(text: str) -> tuple[ExitCause, str] | None:
    for cause, pattern in (
        (ExitCause.HARDWARE, _HARDWARE),
        (ExitCause.UNCLEAR, _UNCLEAR),
        (ExitCause.MISSING, _MISSING),
    ):
        if found := pattern.search(text):
            return cause, found[0].strip()
    return None


# What torch raises in a rank whose peer is gone: its own exception types, or words that only gloo, NCCL and torch use.
# Such an error counts even if the script raised another one because of it. A script's own ConnectionError does not.
_CONTACT = re.compile(
    r"^(torch\.distributed\.)?Dist(Backend|Network|Store)Error\b|/gloo/transport/|NCCL (error|communicator|watchdog)|"
    r"\bnccl(Remote|System)Error\b|ProcessGroup(Gloo|NCCL).*(aborted|terminat|tim(ed|e) ?out)|"
    r"process group (is|was|has been) (aborted|shut ?down|destroyed)|Application timeout caused pair closure|"
    r"EDL: left the process group|failed to pass monitoredBarrier",
    re.IGNORECASE | re.MULTILINE,
)

# The last line that torch's DataLoader raises when a process that loads data for a script ended: at SIGCHLD, or when it
# notices that the process is missing. Only the former says how the process ended. If nothing does, as in a thread other
# than the main one, it may have had an exit code of its own, which is the script's error.
_READER = re.compile(
    r"RuntimeError: DataLoader worker \(pid(\(s\) [\d, ]+\) exited unexpectedly| \d+\) is killed by signal)"
)
_READER_KILLED = re.compile(r"^RuntimeError: DataLoader worker \(pid \d+\) is killed by signal", re.MULTILINE)
_READER_ERROR = re.compile(
    r"^RuntimeError: DataLoader worker \(pid \d+\) exited unexpectedly with exit code", re.MULTILINE
)

# Only the wait for a teacher, which a later start may shorten. The same class also says that no teacher accepts so
# large a request: that needs a change in the script.
_NO_TEACHER: Final = re.compile(
    r"^edl\.errors\.NoTeacherError: (no live teacher for (?:(?! accepted ).)+? within .*)$", re.MULTILINE
)
_HANDLED: Final = "\nDuring handling of the above exception"  # what follows is a mistake of the script's own handler
_NO_TEACHER_REMEDY: Final = (
    "start the job again when a teacher is live (the operator does so), keep teachers with the pool's minReplicas, or "
    "wait longer with Options(teacher_timeout_s=SECONDS)"
)
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
_MAX_NAMED: Final = 4  # ranks in a message: of thousands, a few are enough


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed."""

    rank: int  # its rank in the job
    status: int  # its exit code; if a signal killed it, the negative signal number
    text: str  # its traceback; empty if it left none
    description: str  # how it ended, in one line
    alone: bool = False  # whether the world had no other rank, with which it could have lost contact

    @property
    def cause(self) -> ExitCause:
        if self.alone and self.status == -signal.SIGABRT:
            return ExitCause.CRASHED
        return find_exit_cause(self.status, self.text)

    @property
    def reason(self) -> str:
        if found := find_gpu_fault(self.text):
            return f"rank {self.rank}: {found[1]}"
        return f"rank {self.rank}: {_last_line(self.text)}" if self.status > 0 and self.text else self.description


@dataclass(frozen=True)
class RecoveryDecision:
    """What follows from failures: a new generation, or the end of the job."""

    restart: str = ""  # why a new generation is needed; empty if none is
    fatal: str = ""  # why the job must end; empty if it need not
    after_error: bool = False  # whether the restart forgives an error of the script itself
    unclear: bool = False  # whether a GPU or a kernel of the script failed, and it is unknown which
    leave_out: bool = False  # whether the node's GPU is to blame, so that the job continues without the node
    traceback: str = ""  # the whole error, if a GPU may have failed or no cause was found
    rank: int = -1  # rank of the worker that led to the decision; -1 for none
    cause: ExitCause | None = None  # why that worker ended; None for none
    oom_kills: int | None = 0  # processes that the kernel killed for lack of memory in this generation; None: unknown
    needs_memory: bool = False  # whether the node must leave because the kernel killed a worker that way


def find_exit_cause(status: int, text: str) -> ExitCause:
    if status == -signal.SIGABRT:
        return ExitCause.PEER_LOST
    if -status in _CRASHES:
        return ExitCause.CRASHED
    if status < 0 or (
        _READER.match(_last_line(text)) and _READER_KILLED.search(text) and not _READER_ERROR.search(text)
    ):
        return ExitCause.KILLED
    if _MISUSE.search(text):  # NCCL refused what the script requested, such as one GPU for two ranks
        return ExitCause.ERROR
    if found := find_gpu_fault(text):
        return found[0]
    if (found_at := _NO_TEACHER.search(text)) and _HANDLED not in text[found_at.end() :]:
        return ExitCause.NO_TEACHER
    return ExitCause.PEER_LOST if _CONTACT.search(text) else ExitCause.ERROR


def decide_recovery(
    failures: Sequence[WorkerFailure],
    waited_s: float,
    *,
    error_grace_s: float,
    contact_timeout_s: float,
    ended: Collection[int] = (),
    missing: bool = False,
    trained: bool = False,
) -> RecoveryDecision | None:
    """Decide what to do about a generation's failures on a node. `failures` are in the order in which they were seen.

    The first failure was seen `waited_s` seconds ago, and the world has not changed since. An exception counts as the
    script's own error after `error_grace_s` seconds. An exit code without a traceback counts as such an error after
    `contact_timeout_s` seconds, during which a lost node's lease expires. If ranks only lost contact, the decision
    follows `error_grace_s` seconds after that. On the ranks in `ended`, the script has ended with exit code 0. Other
    ranks lose contact with these ranks, as they do if a node is `missing`. If the workers have `trained`, the script
    does not ask for too many GPUs. Returns None while the cause may still become known on another node.
    """
    missing_gpu_means = ExitCause.UNCLEAR if trained else ExitCause.ERROR
    causes = [missing_gpu_means if failure.cause is ExitCause.MISSING else failure.cause for failure in failures]
    errors, waits, killed, unclear, broken = (
        [failure for failure, found in zip(failures, causes, strict=True) if found in group]
        for group in (
            (ExitCause.ERROR,),
            (ExitCause.NO_TEACHER,),
            (ExitCause.KILLED, ExitCause.CRASHED),
            (ExitCause.UNCLEAR,),
            (ExitCause.HARDWARE,),
        )
    )
    if broken:
        return RecoveryDecision(
            restart=broken[0].reason,
            leave_out=True,
            traceback=broken[0].text,
            rank=broken[0].rank,
            cause=ExitCause.HARDWARE,
        )
    if killed:
        return RecoveryDecision(restart=killed[0].reason, rank=killed[0].rank, cause=killed[0].cause)
    if wrong := errors + waits:
        error = next((failure for failure in wrong if failure.text), wrong[0])
        # Without a traceback, the script may have ended itself because a node was lost. If that loss shows later, the
        # next world continues without the node.
        if not error.text and missing:
            return None
        limit_s = error_grace_s if error.text else contact_timeout_s
        fatal = f"{error.description}\n{error.text}" if error.text else error.description
        decision = RecoveryDecision(fatal=fatal, rank=error.rank, cause=ExitCause.ERROR)
        if error in waits and (found := _NO_TEACHER.search(error.text)):
            fatal = f"{fatal.rstrip()}\n{found[1]}: {_NO_TEACHER_REMEDY}"
            decision = replace(decision, fatal=fatal, cause=ExitCause.NO_TEACHER)
        return decision if waited_s >= limit_s else None
    if unclear:
        first = unclear[0]
        decision = RecoveryDecision(
            restart=first.reason, unclear=True, traceback=first.text, rank=first.rank, cause=ExitCause.UNCLEAR
        )
        return decision if waited_s >= error_grace_s else None
    # An exit code without a traceback waits for `contact_timeout_s` too. Peers that lost contact with that rank wait
    # longer: if they restarted first, the error would not be counted.
    if failures and waited_s >= contact_timeout_s + error_grace_s:
        first = failures[0]
        what = first.description if first.status < 0 else f"rank {first.rank} lost contact with another rank"
        if ended and not missing and all(failure.status > 0 for failure in failures):  # a signal has other causes
            what += f", perhaps because the script had ended on {_ranks(ended)}: all ranks must make the same steps"
        return RecoveryDecision(restart=what, traceback=first.text, rank=first.rank, cause=ExitCause.PEER_LOST)
    return None


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which is the exception if the exception's message has one line."""
    return text.rstrip().rpartition("\n")[2].strip()


def _ranks(ranks: Collection[int]) -> str:
    named = ", ".join(str(rank) for rank in sorted(ranks)[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def read_error_file(path: Path) -> str:
    """Return the traceback that a worker left in torchrun's error file, or "" if there is none."""
    try:
        message = json.loads(path.read_text("utf-8", "replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(message, dict):
        return str(message)
    details = message.get("extraInfo", {})
    callstack = details.get("py_callstack", "") if isinstance(details, dict) else ""
    return str(callstack or message.get("message", ""))


_FRUITLESS: Final = 10  # consecutive restarts without progress: more than a flapping node needs until it is excluded
_FRUITFUL_S: Final = 60.0  # in which workers made progress, as far as can be told of a script that reports no steps

HANGING = "the workers hang"  # beginning of a restart's reason that makes every node log its workers' stacks

_REGULAR: Final = (
    "they do so {}, and a restart does not help: if the script does long work there, such as an evaluation, "
    "that work was interrupted. Put it into Checkpointer.busy() or evaluate(), or choose a longer --hang-after"
)


@dataclass(frozen=True)
class Progress:
    """The progress of a node's workers."""

    step: int  # the last step that any of them finished; -1 if they report none
    made: int = 0  # number of steps that all of them made since the node joined; a repeated step counts again


class RestartPolicy:
    """Limits the restarts of a node's workers."""

    def __init__(self, max_forgiven: int) -> None:
        self._max_forgiven = max_forgiven
        self._fruitless = 0
        self._best_step = -1
        self._unclear_faults = 0
        self._hangs: list[Progress] = []  # when workers were killed because they hung

    def apply_limits(self, decision: RecoveryDecision, forgiven: int, progress: Progress) -> RecoveryDecision:
        step = progress.step
        if decision.unclear and self._unclear_faults:
            return replace(decision, leave_out=True)
        if decision.fatal and forgiven < self._max_forgiven:
            return replace(decision, restart=decision.fatal.split("\n", 1)[0], fatal="", after_error=True)
        if decision.restart and self._fruitless >= _FRUITLESS and self._best_step >= step:
            why = f"{_FRUITLESS} restarts in a row made no progress; the last because {decision.restart}"
            fatal = "\n".join(filter(None, (why, decision.traceback)))
            return replace(decision, restart="", fatal=fatal, unclear=False, leave_out=False)
        if decision.restart.startswith(HANGING) and (when := self._find_regularity(progress)):
            why = f"{decision.restart}; {_REGULAR.format(when)}"
            return replace(decision, restart="", fatal=why, cause=ExitCause.ERROR)
        return decision

    def _find_regularity(self, progress: Progress) -> str:
        """Return, as text, the pattern in which the workers hang repeatedly; empty if there is no pattern.

        There are two patterns: the workers hang again after a step that they have repeated since the last hang, or they
        hang at regular intervals, counted in steps. The beginning of the job counts as the first hang; the first step
        is 0 or 1.
        """
        if not self._hangs:
            return ""
        last, step = self._hangs[-1], progress.step
        if step == last.step and progress.made > last.made:
            return "again after the same step"
        starts = [hang.step for hang in self._hangs[-2:-1]] or [-1, 0]
        if any(step - last.step == last.step - start > 0 for start in starts):
            return f"every {step - last.step} steps"
        return ""

    def record_unclear_fault(self) -> None:
        """Record a fault that a GPU or a script's kernel may have caused. The next such fault is blamed on the GPU."""
        self._unclear_faults += 1

    def record_restart(self, progress: Progress, lived_s: float, *, hung: bool = False) -> None:
        step = progress.step
        if hung and step not in [hang.step for hang in self._hangs[-1:]]:
            self._hangs.append(progress)
        self._fruitless = 0 if step > self._best_step or lived_s > _FRUITFUL_S else self._fruitless + 1
        self._best_step = max(self._best_step, step)


_PEER_FAILURE_GRACE_S = 0.5  # in which a peer's death may cause a traceback, which would count as the script's error
_LEASE_GRACE_S = 1.0  # how long, beyond a lease's length, other agents may need to see that a node is gone


class GenerationOutcome:
    """Collects exits and failures of a node's workers, one generation at a time."""

    def __init__(self, lease_s: float, max_restarts: int, *, leave_on_oom: bool = False) -> None:
        self._lease_s = lease_s
        self._failures: list[WorkerFailure] = []
        self._failed_at = 0.0
        self._ended_well: set[int] = set()
        self._restart_policy = RestartPolicy(max_restarts)
        self._began_at = 0.0
        self._alone = False
        self._oom_kills: int | None = None
        self._leave_on_oom = leave_on_oom
        self._killed_for_memory = False

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    @property
    def ended_well(self) -> int:
        return len(self._ended_well)

    def clear_generation(self) -> None:
        if any(failure.cause in (ExitCause.UNCLEAR, ExitCause.MISSING) for failure in self._failures):
            self._restart_policy.record_unclear_fault()  # even if another node started over first because of it
        self._failures.clear()
        self._ended_well.clear()
        self._killed_for_memory = False

    def begin_generation(self, now: float, *, alone: bool = False) -> None:
        self._began_at = now
        self._alone = alone
        self._oom_kills = cgroups.read_oom_kills()

    def record_exit(self, rank: int, status: int, description: str, error_file: Path) -> None:
        """Record that a worker ended. `status` is its exit code, or minus the number of the signal that killed it."""
        if status == 0:
            self._ended_well.add(rank)
            return
        if status == -signal.SIGKILL and self._count_oom_kills():
            description += ": there was too little memory, according to the cgroup"
        failure = WorkerFailure(rank, status, read_error_file(error_file), description, self._alone)
        # If the kernel killed a process that loads data for a worker, the worker's own error only says so.
        by_kill = status == -signal.SIGKILL or (status > 0 and failure.cause is ExitCause.KILLED)
        self._killed_for_memory |= by_kill and bool(self._count_oom_kills())
        self._record_failure(failure)

    def record_lost_zygote(self, rank: int) -> None:
        self._killed_for_memory |= bool(self._count_oom_kills())
        self.record_stuck_worker(rank, "the process that forks workers died")

    def _count_oom_kills(self) -> int | None:
        """Return how many processes the kernel killed in this generation for lack of memory; None if unknown."""
        now = cgroups.read_oom_kills()
        return None if now is None or self._oom_kills is None else now - self._oom_kills

    def record_stuck_worker(self, rank: int, description: str, number: int = signal.SIGKILL) -> None:
        self._record_failure(WorkerFailure(rank, -number, "", description))

    def _record_failure(self, failure: WorkerFailure) -> None:
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
        progress: Progress,
        known_at: float = math.inf,
    ) -> RecoveryDecision | None:
        """Decide what follows from the failures. Returns None if nothing has failed, or while the cause is unclear.

        `known_at` is the time at which `missing` and `others_ended` were read. A machine that has been paused since
        then does not know which leases have expired.
        """
        if not self._failures:
            return None
        ended = {*others_ended, *self._ended_well}
        decision = decide_recovery(
            self._failures,
            min(known_at, time.monotonic()) - self._failed_at,
            error_grace_s=_PEER_FAILURE_GRACE_S,
            contact_timeout_s=_PEER_FAILURE_GRACE_S if ended else self._lease_s + _LEASE_GRACE_S,
            ended=ended,
            missing=missing,
            trained=trained,
        )
        if decision is None:
            return None
        decision = replace(decision, oom_kills=self._count_oom_kills())
        if decision.restart and self._leave_on_oom and self._killed_for_memory and not decision.leave_out:
            return replace(decision, needs_memory=True)
        return self._restart_policy.apply_limits(decision, forgiven, progress)

    def count_restart(self, progress: Progress) -> None:
        hung = any(failure.description.startswith(HANGING) for failure in self._failures)
        lived_s = 0.0 if hung else time.monotonic() - self._began_at
        self._restart_policy.record_restart(progress, lived_s, hung=hung)
