"""How a worker that goes on in the same process hears of the next generation: lines of JSON in a pipe.

Each line is the whole environment that a new worker would get. The agent opens the pipe, writes a line and closes it.
A thread reads here, so that a worker that waits for a lost one in a collective can be woken.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from edl.errors import ProtocolError
from edl.settings import read

__all__ = ["Control", "generation_of"]

_READ_NBYTES = 1 << 16


class Control:
    """What the agent says. Without an agent it says nothing. A context: reads from `__enter__` to `__exit__`.

    Args:
        path: the pipe; None where there is no agent.
        generation: that this worker belongs to; what is said of it or of an earlier one is old.
        wake: called from a thread of this object when the next generation is known, and before `take` returns it.
    """

    def __init__(self, path: Path | None, generation: int, wake: Callable[[], object]) -> None:
        self.path = path
        self._wake = wake
        self._generation = generation
        self._coming = generation
        self._said: Mapping[str, str] | None = None
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="edl-control", daemon=True)

    @classmethod
    def from_env(cls, wake: Callable[[], object]) -> Control:
        """The pipe that `EDL_CONTROL` names."""
        return cls(read("EDL_CONTROL", Path), read("EDL_GENERATION", int) or 0, wake)

    @property
    def coming(self) -> bool:
        """Whether there is a generation after the present one. True before `wake` is called."""
        return self._coming > self._generation

    def take(self, timeout_s: float) -> Mapping[str, str] | None:
        """The environment of the newest generation, the present one from now on; None if none comes in time."""
        with self._lock:
            self._lock.wait_for(lambda: self._said is not None, timeout_s)
            said, self._said = self._said, None
            if said is not None:
                self._generation = generation_of(said)
            return said

    def __enter__(self) -> Control:
        if self.path is not None:
            # Also open for writing, so that the pipe does not end when the agent closes it.
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None:
            os.close(self._stop)
            self._thread.join()
            os.close(self._stopped)
            os.close(self._pipe)

    def _follow(self) -> None:
        left = b""
        while True:
            readable, _, _ = select.select([self._pipe, self._stopped], [], [])
            if self._stopped in readable:
                return
            *lines, left = (left + os.read(self._pipe, _READ_NBYTES)).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, environ: Mapping[str, str]) -> None:
        if generation_of(environ) <= self._coming:
            return
        # In this order: whoever makes a group looks at `coming` after `wake` can reach that group.
        self._coming = generation_of(environ)
        self._wake()
        with self._lock:
            self._said = environ
            self._lock.notify_all()


def generation_of(environ: Mapping[str, str]) -> int:
    """Of which generation an environment is.

    Raises:
        ProtocolError: it does not say so.
    """
    try:
        return int(environ["EDL_GENERATION"])
    except (KeyError, ValueError) as exc:
        raise ProtocolError("an agent's environment without a number in EDL_GENERATION") from exc
