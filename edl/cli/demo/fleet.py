"""The teachers: `edl serve` processes that register themselves, and that die with the demo at the latest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edl.errors import EDLError

__all__ = ["MODEL", "SERVICE", "Fleet"]

SERVICE = "digits"
MODEL = "digits"

_START_S = 120.0
_STOP_S = 10.0


@dataclass
class _Member:
    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path


class Fleet:
    """Starts and ends teachers by name. Use it as a context manager: whoever still runs at its end is ended.

    Args:
        folder: for logs and the files by which teachers say that they are ready.
        checkpoint: the teacher's weights.
        discovery: URL of the registry that the teachers enter.
        pause_ms: how much longer each batch takes; see `edl.cli.demo.models.Teacher`.
    """

    def __init__(self, folder: Path, checkpoint: Path, discovery: str, pause_ms: float) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._discovery, self._pause_ms = discovery, pause_ms
        self._members: dict[str, _Member] = {}

    def command(self, name: str) -> list[str]:
        """The arguments of `edl` that make a teacher."""
        return [
            *("serve", "--torch-factory", "edl.cli.demo.models:teacher", "--checkpoint", str(self._checkpoint)),
            *("--option", f"pause_ms={self._pause_ms:g}", "--threads", "1", "--device", "cpu"),
            *("--input", "image:float32[1,8,8]", "--output", "logits:float32[10]", "--model", MODEL),
            *("--service", SERVICE, "--id", name, "--discovery", self._discovery),
            *("--max-batch", "64", "--port", "0", "--ready-file", str(self._folder / f"{name}.ready")),
        ]

    def start(self, name: str) -> None:
        """Start a teacher, without waiting until it serves."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "edl.cli.demo.leash", str(os.getpid()), *self.command(name)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its teachers
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._members[name] = _Member(process, log, self._folder / f"{name}.ready")

    def is_ready(self, name: str) -> bool:
        """Whether the teacher serves.

        Raises:
            EDLError: it has ended instead; carries the end of its log.
        """
        member = self._members[name]
        code = member.process.poll()
        if code is not None:
            words = member.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise EDLError(f"teacher {name} ended with code {code} instead of serving: {' / '.join(words)}")
        return member.ready_file.exists()

    def wait_ready(self, name: str) -> None:
        """Wait until the teacher serves.

        Raises:
            EDLError: it ended, or it takes too long.
        """
        deadline = time.monotonic() + _START_S
        while not self.is_ready(name):
            if time.monotonic() > deadline:
                raise EDLError(f"teacher {name} does not serve after {_START_S:g} s; see {self._members[name].log}")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """SIGKILL: the teacher is gone at once, in the middle of whatever it does."""
        self._members[name].process.kill()

    def drain(self, name: str) -> None:
        """SIGTERM: the teacher leaves discovery, finishes what it has, and exits."""
        self._members[name].process.terminate()

    def exit_code(self, name: str) -> int | None:
        """How the teacher ended, waiting a little for it; None while it runs."""
        try:
            return self._members[name].process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everybody: politely, then not."""
        processes = [member.process for member in self._members.values()]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if exc is not None else signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
