"""Why workers ended, and what follows: the script's own error, a machine's fault, or contact lost with another rank."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from edl.collective.agent.health.gpu_faults import GpuFault, find_gpu_fault, is_nccl_misuse

__all__ = ["WorkerFailure", "ExitCause", "RecoveryDecision", "decide_recovery", "find_exit_cause", "read_error_file"]

# What torch raises in a rank whose peer is gone: its own types, and else words that only gloo, NCCL and torch say. Such
# an error counts also where the script raised another one because of it. A script's own ConnectionError does not.
_CONTACT = re.compile(
    r"^(torch\.distributed\.)?Dist(Backend|Network|Store)Error\b|/gloo/transport/|NCCL (error|communicator|watchdog)|"
    r"\bnccl(Remote|System)Error\b|ProcessGroup(Gloo|NCCL).*(aborted|terminat|tim(ed|e) ?out)|"
    r"process group (is|was|has been) (aborted|shut ?down|destroyed)|Application timeout caused pair closure|"
    r"EDL: left the process group|failed to pass monitoredBarrier",
    re.IGNORECASE | re.MULTILINE,
)

# The last line where a process that reads data for a script ended, as torch's DataLoader raises it: when SIGCHLD comes,
# and when it misses that process. Only the former says how it ended. Where nothing does, as in a thread other than the
# main one, it may have been with an exit code of its own, which is the script's error.
_READER = re.compile(
    r"RuntimeError: DataLoader worker \(pid(\(s\) [\d, ]+\) exited unexpectedly| \d+\) is killed by signal)"
)
_READER_KILLED = re.compile(r"^RuntimeError: DataLoader worker \(pid \d+\) is killed by signal", re.MULTILINE)
_READER_ERROR = re.compile(
    r"^RuntimeError: DataLoader worker \(pid \d+\) exited unexpectedly with exit code", re.MULTILINE
)
_MAX_NAMED: Final = 4  # ranks in a message: of thousands some are enough to look at


class ExitCause(Enum):
    """Why a worker ended that did not end well."""

    KILLED = "killed"
    """By a signal, it or a process that reads data for it: out of memory, preempted, a crash in native code."""
    PEER_LOST = "contact"
    """It lost contact with another rank; the cause is elsewhere. Where native code finds that out, as Paddle's gloo and
    NCCL's watchdog do, the process ends by SIGABRT."""
    ERROR = "error"
    """The script raised, or ended with an exit code that is not 0. A failed assertion in a kernel is one as well."""
    HARDWARE = "hardware"
    """A GPU of the node is broken."""
    UNCLEAR = "unclear"
    """A kernel did what it must not: its own error, or the GPU's."""
    MISSING = "missing"
    """There is no such GPU: an error of the script's, unless the GPU was there before."""


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that did not end well.

    Attributes:
        rank: the worker's, in the job.
        status: its exit code; of a worker that a signal killed, the signal's number with a minus.
        text: its traceback, empty if it left none.
        description: how it ended, in a line.
    """

    rank: int
    status: int
    text: str
    description: str

    @property
    def cause(self) -> ExitCause:
        """Why the worker ended, as far as its own end tells."""
        return find_exit_cause(self.status, self.text)

    @property
    def reason(self) -> str:
        """Why the worker ended, in a line, if a signal or a GPU ended it."""
        if found := find_gpu_fault(self.text):
            return f"rank {self.rank}: {found[1]}"
        return f"rank {self.rank}: {_last_line(self.text)}" if self.status > 0 and self.text else self.description


@dataclass(frozen=True)
class RecoveryDecision:
    """The decision that follows from failures: a new generation or the end of the job.

    Attributes:
        restart: why there is to be a new generation; empty for none.
        fatal: why the job is to end; empty if it is not.
        after_error: an error of the script's own is forgiven with the restart.
        unclear: a GPU failed, or a kernel of the script, and nothing tells which.
        leave_out: the node's GPU is to blame, and the job goes on without the node.
        traceback: the whole error, where a GPU may have failed.
        rank: of the worker from which the decision follows, -1 for none.
        cause: why that worker ended, None for none.
        oom_kills: how many processes the kernel has killed for want of memory in this generation; None if unknown.
        needs_memory: the kernel killed a worker so, and the node shall leave instead of trying the same again.
    """

    restart: str = ""
    fatal: str = ""
    after_error: bool = False
    unclear: bool = False
    leave_out: bool = False
    traceback: str = ""
    rank: int = -1
    cause: ExitCause | None = None
    oom_kills: int | None = 0
    needs_memory: bool = False


def find_exit_cause(status: int, text: str) -> ExitCause:
    """Return why a worker ended.

    Args:
        status: the worker's exit code, negative for a signal.
        text: the exception's type and message, best with its traceback; empty if unknown.
    """
    if status == -signal.SIGABRT:
        return ExitCause.PEER_LOST
    if status < 0 or (
        _READER.match(_last_line(text)) and _READER_KILLED.search(text) and not _READER_ERROR.search(text)
    ):
        return ExitCause.KILLED
    if is_nccl_misuse(text):
        return ExitCause.ERROR
    if found := find_gpu_fault(text):
        return {
            GpuFault.HARDWARE: ExitCause.HARDWARE,
            GpuFault.UNCLEAR: ExitCause.UNCLEAR,
            GpuFault.MISSING: ExitCause.MISSING,
        }[found[0]]
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
    xids: Sequence[str] = (),
) -> RecoveryDecision | None:
    """Decide what follows from the failures of a generation on a node.

    Args:
        failures: in the order in which they were seen.
        waited_s: how many seconds ago the first was seen, with the world unchanged since.
        error_grace_s: how long to wait before an exception is taken for the script's own fault, in seconds.
        contact_timeout_s: how long to wait, when ranks only lost contact, for a lost node's lease to end, in seconds.
        ended: ranks whose script ended well meanwhile, with which others lose contact.
        missing: a node of the generation is gone, with whose ranks they do so too.
        trained: the job has trained before, here or elsewhere, so that a script that asks for too many GPUs would
            have failed then.
        xids: what the kernel said of failed hardware of this node in this generation.

    Returns:
        What follows; None while the cause may yet show elsewhere.
    """
    missing_gpu_means = ExitCause.UNCLEAR if trained else ExitCause.ERROR
    causes = [missing_gpu_means if failure.cause is ExitCause.MISSING else failure.cause for failure in failures]
    errors, killed, unclear, broken = (
        [failure for failure, found in zip(failures, causes, strict=True) if found is cause]
        for cause in (ExitCause.ERROR, ExitCause.KILLED, ExitCause.UNCLEAR, ExitCause.HARDWARE)
    )
    if broken:
        return RecoveryDecision(
            restart=broken[0].reason,
            leave_out=True,
            traceback=broken[0].text,
            rank=broken[0].rank,
            cause=ExitCause.HARDWARE,
        )
    # An error of the script's own has its cause in its traceback; all other ends are what an Xid leads to.
    if xids and len(errors) < len(failures):
        first = failures[0]
        what = f"{xids[0]}; {first.reason}"
        return RecoveryDecision(restart=what, leave_out=True, rank=first.rank, cause=ExitCause.HARDWARE)
    if killed:
        return RecoveryDecision(restart=killed[0].reason, rank=killed[0].rank, cause=ExitCause.KILLED)
    if errors:
        error = next((failure for failure in errors if failure.text), errors[0])
        # Without a traceback it may have been the loss of a node that the script ended itself for. That may be seen
        # later, and where it is seen, the next world goes on without the node.
        if not error.text and missing:
            return None
        limit_s = error_grace_s if error.text else contact_timeout_s
        fatal = f"rank {error.rank}: {error.description}\n{error.text or error.description}"
        decision = RecoveryDecision(fatal=fatal, rank=error.rank, cause=ExitCause.ERROR)
        return decision if waited_s >= limit_s else None
    if unclear:
        first = unclear[0]
        decision = RecoveryDecision(
            restart=first.reason, unclear=True, traceback=first.text, rank=first.rank, cause=ExitCause.UNCLEAR
        )
        return decision if waited_s >= error_grace_s else None
    if failures and waited_s >= contact_timeout_s:
        first = failures[0]
        what = first.description if first.status < 0 else f"rank {first.rank} lost contact with another one"
        if (
            ended and not missing and all(failure.status > 0 for failure in failures)
        ):  # by a signal: perhaps of its own code
            what += f", perhaps because the script had already ended on {_ranks(ended)}: all must make the same steps"
        return RecoveryDecision(restart=what, rank=first.rank, cause=ExitCause.PEER_LOST)
    return None


def _last_line(text: str) -> str:
    """Return the last line of a traceback: the exception that ended the process, where its message is a line."""
    return text.rstrip().rpartition("\n")[2].strip()


def _ranks(ranks: Collection[int]) -> str:
    """Return some ranks in words."""
    named = ", ".join(str(rank) for rank in sorted(ranks)[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def read_error_file(path: Path) -> str:
    """Return the traceback that a worker left in torchrun's error file, empty if there is none."""
    try:
        message = json.loads(path.read_text("utf-8", "replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(message, dict):
        return str(message)
    details = message.get("extraInfo", {})
    callstack = details.get("py_callstack", "") if isinstance(details, dict) else ""
    return str(callstack or message.get("message", ""))
