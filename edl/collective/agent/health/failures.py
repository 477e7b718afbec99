"""Why workers ended, and what follows: the script's own error, a machine's fault, or contact lost with another rank.

CUDA's words are those of `cudaGetErrorString`; its reference says of each error what causes it
(https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html). The driver writes an Xid into the kernel's
log (https://docs.nvidia.com/deploy/xid-errors/). "device-side assert triggered" and "out of memory" are in no list
here: they are errors of the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

__all__ = [
    "ExitCause",
    "GpuFault",
    "KernelLog",
    "RecoveryDecision",
    "WorkerFailure",
    "decide_recovery",
    "find_exit_cause",
    "find_gpu_fault",
    "is_nccl_misuse",
    "read_error_file",
]


# Lines that begin in the first column are exceptions; a traceback's lines of source are indented, and say nothing.
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

_XID: Final = re.compile(rb"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)")
_HARDWARE_XIDS: Final = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
"""Xids for which NVIDIA's catalogue asks to reset the GPU, reboot or replace it. 13, 31 and 43 are applications' errors
as a rule, 63 and 94 end with the process."""
_RECORD_NBYTES: Final = 8192  # the kernel refuses to read a record into less (CONSOLE_EXT_LOG_MAX)


class GpuFault(Enum):
    """The cause that an error of a GPU names."""

    HARDWARE = "hardware"
    """The node is at fault: its GPU has to be reset or replaced."""
    UNCLEAR = "unclear"
    """The kernel that ran has an error in it, or the GPU is broken: CUDA cannot tell."""
    MISSING = "missing"
    """There is no such GPU: the script asked for too many, or the GPU was there and is no more."""


def find_gpu_fault(text: str) -> tuple[GpuFault, str] | None:
    """Find an error of a GPU in a traceback.

    Returns:
        Its cause as far as known, and the line that says it; None if there is none.
    """
    for fault, pattern in (
        (GpuFault.HARDWARE, _HARDWARE),
        (GpuFault.UNCLEAR, _UNCLEAR),
        (GpuFault.MISSING, _MISSING),
    ):
        found = pattern.search(text)
        if found is not None:
            return fault, found[0].strip()
    return None


def is_nccl_misuse(text: str) -> bool:
    """Return whether NCCL refused what the script asked it for, such as a GPU for two ranks."""
    return _MISUSE.search(text) is not None


class KernelLog:
    """Reads the Xids of failed hardware that the kernel logs from now on.

    A process that NCCL's watchdog ends leaves no traceback, and only this tells why. Without the right to read the log,
    as in most containers, nothing is found.
    """

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        self._found: list[str] = []
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def read_xids(self) -> list[str]:
        """Return all Xids of failed hardware since the last `clear_xids`, in words."""
        while self._file is not None:
            try:
                record = os.read(self._file, _RECORD_NBYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read has the oldest one left
            except OSError:
                break
            if not record:
                break
            for found in _XID.finditer(record):
                number = int(found["number"])
                if number in _HARDWARE_XIDS:
                    device = found["device"].decode(errors="replace")
                    self._found.append(f"Xid {number} of {device} in the kernel's log: {_HARDWARE_XIDS[number]}")
        return list(self._found)

    def clear_xids(self) -> None:
        """Leave out what was logged until now."""
        self.read_xids()
        self._found.clear()

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# --- Why workers ended, and what follows ---


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
