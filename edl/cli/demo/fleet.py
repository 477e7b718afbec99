"""The teachers: `edl serve` processes that register themselves, and that die with the demo at the latest."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from edl.testing import LocalTeacher

__all__ = ["SERVICE", "Fleet"]

SERVICE = "digits"

_START_S = 120.0
"""How long a teacher may take to be ready: it imports torch beside others that do, on few cores."""
_STOP_S = 10.0
"""How long a teacher may take to drain: a batch takes it some ten milliseconds."""


class Fleet:
    """Starts and ends teachers by name. A context manager: it ends what still runs.

    Args:
        folder: for the teachers' logs.
        checkpoint: the teacher's weights.
        discovery: URL of the registry that the teachers enter.
        pause_ms: how much longer a batch takes; see `edl.cli.demo.models.Teacher`.
    """

    def __init__(self, folder: Path, checkpoint: Path, discovery: str, pause_ms: float) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._discovery = discovery
        self._pause_ms = pause_ms
        self._teachers: dict[str, LocalTeacher] = {}

    def start(self, name: str) -> None:
        """Start a teacher, without waiting until it serves."""
        serve = {
            "torch-factory": "edl.cli.demo.models:teacher",
            "checkpoint": self._checkpoint,
            "option": {"pause_ms": self._pause_ms},
            "input": "image:float32[1,8,8]",
            "output": "logits:float32[10]",
            "device": "cpu",
            "threads": 1,
            "linger": "2s",  # this machine is busy, and students may hear of a drain late
            "id": name,
        }
        self._teachers[name] = LocalTeacher(
            "",
            name="digits",
            service=SERVICE,
            discovery=self._discovery,
            serve=serve,
            env={"OMP_NUM_THREADS": "1"},
            wait=False,
        )

    def wait_ready(self, name: str) -> None:
        """Wait until the teacher serves.

        Raises:
            EDLError: it ended, or it takes too long.
        """
        self._teachers[name].wait_ready(_START_S)

    def kill(self, name: str) -> None:
        """Send SIGKILL: the teacher is gone at once, in the middle of its work."""
        self._teachers[name].kill()

    def drain(self, name: str) -> None:
        """SIGTERM: the teacher leaves discovery, finishes what it has, and exits."""
        self._teachers[name].terminate()

    def exit_code(self, name: str) -> int | None:
        """How the teacher ended, waiting a little for it; None while it runs."""
        with contextlib.suppress(TimeoutError):
            return self._teachers[name].wait(_STOP_S)
        return None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._drain_all()
        finally:
            for name, teacher in self._teachers.items():
                self._folder.joinpath(f"{name}.log").write_text(teacher.log)
                teacher.close()

    def _drain_all(self) -> None:
        for teacher in self._teachers.values():
            teacher.terminate()
        for name in self._teachers:
            self.exit_code(name)
