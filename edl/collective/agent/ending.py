"""Handles a node's departure from a job: signals, exit codes, and the message that says why the agent ended.

Kubernetes keeps the last 4,096 bytes of the file that `terminationMessagePath` names
(https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/). `edl.master` may not import
this module, so it reads the message with `edl.master.scaling.terminations`. A test compares both modules.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final

logger = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """Exit codes. If a signal made a node leave, the code is 128 plus the signal's number, such as 143 for SIGTERM."""

    DONE = 0
    FAILED = 1  # the script raised, or exited with a code other than 0
    NOT_STORED = 74  # EX_IOERR of sysexits.h: the script has ended, but its last state is not in storage
    TRY_AGAIN = 75  # EX_TEMPFAIL: too few nodes joined in time, no teacher was live, or the store does not answer
    FAULTY_NODE = 69  # EX_UNAVAILABLE: a GPU of this node failed, or the node failed the check before joining
    OUT_OF_MEMORY = 137  # `--leave-on-oom`; the code after any SIGKILL, so whatever restarts nodes sees no difference


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS_IN_SLURM = (*_SIGNALS, signal.SIGUSR1)  # what `#SBATCH --signal=USR1@60` sends before the time limit


class AskedToLeaveError(Exception):
    """A signal asked this node to leave during a longer wait."""


class StopSignals:
    """Counts the signals that arrive between `__enter__` and `__exit__`, in the main thread, and calls `wake` for each.

    Slurm repeats SIGTERM. So with `slurm`, only a further SIGINT, which a person sends through `srun`, is urgent.
    """

    def __init__(self, wake: Callable[[], None], *, slurm: bool = False) -> None:
        self._wake = wake
        self.slurm = slurm
        self._numbers: list[int] = []
        self._previous_handlers: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        return bool(self._numbers)

    @property
    def urgent(self) -> bool:
        """Whether this node was asked a second time to leave and must do so at once."""
        return any(not self.slurm or number == signal.SIGINT for number in self._numbers[1:])

    @property
    def number(self) -> int:
        return self._numbers[0]

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process that the last signal ended."""
        return 128 + self._numbers[-1]

    def raise_if_stopping(self) -> None:
        if self._numbers:
            raise AskedToLeaveError

    def __enter__(self) -> StopSignals:
        signals = _SIGNALS_IN_SLURM if self.slurm else _SIGNALS
        # A signal that this process inherited as ignored stays ignored, such as SIGHUP under nohup.
        handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, self._record_signal) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: object) -> None:
        self._numbers.append(number)
        self._wake()


# --- The termination message: why a node's agent ended, in a small file that outlives it ---


_MAX_BYTES: Final = 4096  # that the kubelet reads; it keeps only the end of a longer file, which would not be JSON
_NAME_CHARS: Final = 253  # of a node's name, the longest a host name can be; the rest is for the message
_GAP: Final = "\n[...]\n"


@dataclass(frozen=True)
class TerminationMessage:
    """Why an agent ended."""

    cause: str = ""  # a value of `edl.collective.agent.health.failures.ExitCause`; empty if no worker failed
    exit_code: int = 0  # exit code of the agent
    rank: int = -1  # the rank that failed first; -1 for none
    node: str = ""  # name in the job of the node that ran this rank; of this node if no worker failed
    oom_kills: int | None = 0  # processes here that the kernel killed for lack of memory; None: unknown
    message: str = ""  # text for a person, with as much of a traceback as fits

    def encode(self) -> bytes:
        """Return the message as a UTF-8 JSON object of at most 4,096 bytes. A long text is shortened."""
        values = asdict(self) | {"node": self.node[:_NAME_CHARS], "message": ""}
        room = _MAX_BYTES - len(_to_json(values))
        return _to_json(values | {"message": cut_middle(self.message, room)})


def write_termination_message(path: str, message: TerminationMessage) -> None:
    """Write to a file why this agent ended: in place, because containers mount the file. A failure is only logged."""
    if not path:
        return
    data = message.encode()
    try:
        # Non-blocking, since opening a pipe that has no reader would wait forever.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            os.write(file, data)
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.ftruncate(file, len(data))  # removes what is left of a longer message
        finally:
            os.close(file)
    except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
        logger.warning("the reason why this node ended cannot be written to %s (EDL_TERMINATION_LOG): %s", path, exc)


def cut_middle(text: str, max_bytes: int) -> str:
    """Return a text whose JSON has at most `max_bytes` bytes. A long text keeps its start and its end (the error)."""
    if _count_bytes(text) <= max_bytes:
        return text
    start = _keep_start(text, max_bytes // 4)
    return start + _GAP + _keep_start(text[::-1], max_bytes - _count_bytes(start + _GAP))[::-1]


def _keep_start(text: str, max_bytes: int) -> str:
    used = 0
    for at, character in enumerate(text):
        used += _count_bytes(character)
        if used > max_bytes:
            return text[:at]
    return text


def _count_bytes(text: str) -> int:
    return len(_to_json(text)) - 2  # its quotation marks


def _to_json(value: object) -> bytes:
    """Return UTF-8 JSON, with a question mark for each lone surrogate, which a file name may contain."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
