"""How a node's part in a job ends: signals that ask it to leave, exit codes, the message that says what ended it.

Kubernetes keeps the last 4,096 bytes of the file that `terminationMessagePath` names in the container's status
(https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/). `edl.master` reads it with
`edl.master.scaling.termination_messages`, which it may not import from here; a test compares the two.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final

__all__ = [
    "AskedToLeaveError",
    "ExitCode",
    "StopSignals",
    "TerminationMessage",
    "cut_traceback",
    "write_termination_message",
]

logger = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """Exit codes; a node that left on a signal ends with 128 and the signal's number, as 143 for SIGTERM."""

    DONE = 0
    FAILED = 1
    """The script raised, or ended with another code than 0."""
    NOT_STORED = 74
    """The script has ended, but the last state of this node's workers is not in storage (EX_IOERR of sysexits.h)."""
    TRY_AGAIN = 75
    """Too few nodes came within the deadline (EX_TEMPFAIL of sysexits.h): try again later. `edl.cli` ends so as well
    where the store does not answer when a node comes."""
    FAULTY_NODE = 69
    """A GPU of this node failed, or the node did not pass the check before joining (EX_UNAVAILABLE): run elsewhere."""
    OUT_OF_MEMORY = 137
    """The kernel killed a worker for want of memory, and the node left for that (`--leave-on-oom`). It is the code of a
    process that SIGKILL ended, so that whatever starts nodes again treats it alike."""


# --- The signals that stop an agent ---


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS_IN_SLURM = (*_SIGNALS, signal.SIGUSR1)  # what `#SBATCH --signal=USR1@60` sends before the time limit


class AskedToLeaveError(Exception):
    """A signal asked this node to leave while it waited for something that would have taken longer."""


class StopSignals:
    """Counts the signals that arrive between `__enter__` and `__exit__`, which are for the main thread.

    The handler only counts: code in the middle of something decides itself when to act on a signal.

    Args:
        wake: called with every signal, in the main thread, wherever that is.
        slurm: whether Slurm sends the signals. It repeats SIGTERM (at the begin and at the end of a partition's
            GraceTime, and when a job is cancelled that was asked before), which says nothing of how urgent it is:
            SIGKILL follows by itself. Only SIGINT, which a person sends through `srun`, then hurries.
    """

    def __init__(self, wake: Callable[[], None], *, slurm: bool = False) -> None:
        self._wake = wake
        self.slurm = slurm
        self._numbers: list[int] = []
        self._previous_handlers: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether this node shall leave."""
        return bool(self._numbers)

    @property
    def urgent(self) -> bool:
        """Whether it was asked a second time, and shall leave at once."""
        return any(not self.slurm or number == signal.SIGINT for number in self._numbers[1:])

    @property
    def number(self) -> int:
        """The signal that came first, which the workers get as well."""
        return self._numbers[0]

    @property
    def exit_code(self) -> int:
        """The exit code of a process that left for the last signal, as a shell gives it."""
        return 128 + self._numbers[-1]

    def raise_if_stopping(self) -> None:
        """Return if no signal came; code that waits calls this again and again.

        Raises:
            AskedToLeaveError: a signal came.
        """
        if self._numbers:
            raise AskedToLeaveError

    def __enter__(self) -> StopSignals:
        signals = _SIGNALS_IN_SLURM if self.slurm else _SIGNALS
        # What this process was started to ignore stays ignored, such as SIGHUP under nohup.
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


# --- What ended a node's agent, in a small file that outlives it ---


_MAX_BYTES: Final = 4096
"""As the kubelet reads: of a longer file it would keep the end, which is no JSON."""
_NAME_CHARS: Final = 253  # of a node's name, as long as a host's may be: the message must keep its room
_GAP: Final = "\n[...]\n"
_LEAST_PARTS_BYTES: Final = 200
"""Below this, parts with gaps between them say less than the end of the text, and may not even fit."""
_FRAME: Final = re.compile(r'^ +(\| +)?File "', re.MULTILINE)  # a call in a traceback, in an exception group too
_FIRST_COLUMN: Final = re.compile(r"^\S", re.MULTILINE)


@dataclass(frozen=True)
class TerminationMessage:
    """What ended an agent.

    Attributes:
        cause: a value of `edl.collective.agent.health.failures.ExitCause`, empty where no worker failed.
        exit_code: of the agent.
        rank: of the worker that failed first, -1 for none.
        node: the node's name in the job on which that worker ran; of this node where no worker failed.
        oom_kills: how many processes of this node the kernel killed for want of memory since the workers were started,
            where a worker here failed, else 0; None if the kernel does not tell.
        message: what a person should read: the traceback, as far as there is room.
    """

    cause: str = ""
    exit_code: int = 0
    rank: int = -1
    node: str = ""
    oom_kills: int | None = 0
    message: str = ""

    def encode(self) -> bytes:
        """Return the message as a JSON object of at most 4,096 bytes, valid UTF-8; a long text is cut."""
        values = asdict(self) | {"node": self.node[:_NAME_CHARS], "message": ""}
        room = _MAX_BYTES - len(_to_json(values))
        return _to_json(values | {"message": cut_traceback(self.message, room)})


def write_termination_message(path: str, message: TerminationMessage) -> None:
    """Write what ended this agent to a file. What goes wrong is logged: it must not change how the agent ends.

    The file is written in place, by a single call: a container's is a mount, which nothing can be renamed onto.

    Args:
        path: the file; empty to write nothing.
        message: what ended the agent.
    """
    if not path:
        return
    data = message.encode()
    try:
        # Not waiting: of a pipe that nothing reads, opening would wait for ever.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            os.write(file, data)
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.ftruncate(file, len(data))  # of what an earlier run wrote
        finally:
            os.close(file)
    except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
        logger.warning("what ended this node cannot be written to %s (EDL_TERMINATION_LOG): %s", path, exc)


def cut_traceback(text: str, max_bytes: int) -> str:
    """Return the most telling part of a traceback: its first line, the last calls, and the exception.

    Returns:
        The text; of a long text, parts with `[...]` between them.
    """
    if _count_bytes(text) <= max_bytes:
        return text
    if max_bytes < _LEAST_PARTS_BYTES:
        return _keep_end(text, max_bytes)
    at = _find_exception(text)
    exception = text[at:]
    budget = max_bytes * 3 // 4
    if _count_bytes(exception) > budget:  # its type is at the beginning, and what was wrong often at the end
        exception = _keep_start(exception, budget // 2) + _GAP + _keep_end(exception, budget // 3)
    first, _, calls = text[:at].partition("\n")
    first = _keep_start(first, max_bytes // 16)
    left = max_bytes - _count_bytes(first + _GAP + exception)
    kept = _keep_end(calls, left)
    if len(kept) < len(calls):
        kept = kept.partition("\n")[2]  # no line by halves
    return first + _GAP + kept + exception


def _find_exception(text: str) -> int:
    """Return where the exception's own lines begin, after the last call; of other text, its last line."""
    calls = list(_FRAME.finditer(text))
    found = _FIRST_COLUMN.search(text, calls[-1].end()) if calls else None
    return found.start() if found else text.rstrip().rfind("\n") + 1


def _keep_start(text: str, max_bytes: int) -> str:
    return text[: _count_fitting(text[:max_bytes], max_bytes)]


def _keep_end(text: str, max_bytes: int) -> str:
    tail = text[-max_bytes:] if max_bytes > 0 else ""
    kept = _count_fitting(reversed(tail), max_bytes)
    return tail[len(tail) - kept :]


def _count_fitting(characters: Iterable[str], max_bytes: int) -> int:
    """Return how many of the characters fit."""
    used = count = 0
    for character in characters:
        used += _count_bytes(character)
        if used > max_bytes:
            break
        count += 1
    return count


def _count_bytes(text: str) -> int:
    return len(_to_json(text)) - 2  # its quotation marks


def _to_json(value: object) -> bytes:
    """Return JSON in UTF-8; a part of a character that is none, such as of a file's name, is a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
