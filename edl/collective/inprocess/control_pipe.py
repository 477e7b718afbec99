"""The worker's end of the pipe through which an agent announces the next generation to a worker that stays.

The agent's end, and what an announcement looks like, is `edl.collective.agent.processes.environment_pipe`. A thread
reads here, so that a worker that waits for a lost peer in a collective can be woken.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from edl.background import BackgroundLoop
from edl.collective.agent.processes.environment_pipe import EnvironmentDecoder
from edl.errors import ProtocolError
from edl.settings import read

__all__ = ["ControlPipe", "read_generation"]

_READ_NBYTES: Final = 1 << 16
"""What a pipe holds on Linux: with less, a long environment takes several reads."""


class ControlPipe:
    """Receives the environments of new generations, as a context manager; nothing comes where there is no agent.

    Args:
        path: the pipe; None where there is no agent.
        generation: that this worker belongs to. Environments of it and of earlier generations are passed over.
        wake: called from a thread of this object when the next generation is known, before `wait_for_environment`
            returns it.
    """

    def __init__(self, path: Path | None, generation: int, wake: Callable[[], object]) -> None:
        self.path = path
        self._wake = wake
        self._generation = generation
        self._newest = generation
        self._environ: Mapping[str, str] | None = None
        self._lock = threading.Condition()
        self._decoder = EnvironmentDecoder()

    @classmethod
    def from_env(cls, wake: Callable[[], object]) -> ControlPipe:
        """Return the pipe that `EDL_CONTROL` names.

        Args:
            wake: as for the constructor.
        """
        return cls(read("EDL_CONTROL", Path), read("EDL_GENERATION", int) or 0, wake)

    @property
    def has_next_generation(self) -> bool:
        """Whether there is a generation after the present one. True before `wake` is called."""
        return self._newest > self._generation

    def wait_for_environment(self, timeout_s: float) -> Mapping[str, str] | None:
        """Return the environment of the newest generation, which is the present one from now on.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            The environment; None if none comes in time.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._environ is not None, timeout_s)
            environ = self._environ
            self._environ = None
            if environ is not None:
                self._generation = read_generation(environ)
            return environ

    def __enter__(self) -> ControlPipe:
        if self.path is not None:
            # Also open for writing, so that the pipe does not end when the agent closes it.
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            stopped, stop = os.pipe2(os.O_CLOEXEC)
            self._stopped = stopped
            self._stop = stop
            self._owner = os.getpid()
            self._loop = BackgroundLoop("edl-control", self._read_lines, lambda: os.write(self._stop, b"\0"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None or os.getpid() != self._owner:
            return  # a fork that leaves the block shares the pipes with its parent, which goes on reading
        if self._loop.close():
            for descriptor in (self._stop, self._stopped, self._pipe):
                os.close(descriptor)

    def _read_lines(self) -> float | None:
        readable, _, _ = select.select([self._pipe, self._stopped], [], [])
        if self._stopped in readable:
            return None
        for environ in self._decoder.feed_bytes(os.read(self._pipe, _READ_NBYTES)):
            self._receive(environ)
        return 0.0

    def _receive(self, environ: Mapping[str, str]) -> None:
        generation = read_generation(environ)
        if generation <= self._newest:
            return
        # In this order: a thread that makes a group looks at `has_next_generation` after `wake` can reach that group.
        self._newest = generation
        try:
            self._wake()
        finally:  # what was heard is heard once
            with self._lock:
                self._environ = environ
                self._lock.notify_all()


def read_generation(environ: Mapping[str, str]) -> int:
    """Return the generation that an environment is of.

    Args:
        environ: as an agent makes it for a worker.

    Raises:
        ProtocolError: it does not name its generation.
    """
    try:
        return int(environ["EDL_GENERATION"])
    except (KeyError, ValueError) as exc:
        raise ProtocolError("an agent's environment without a number in EDL_GENERATION") from exc
