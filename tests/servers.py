"""Programs of others that tests start: where they are, and servers that may be killed and come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from typing_extensions import Self

ROOT = Path(__file__).parent.parent
START_S = 60.0


def lack(reason: str) -> NoReturn:
    """Skip the test, or fail it in CI."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{reason}; in CI nothing may be skipped")
    pytest.skip(reason)


def find_program(name: str, folder: str) -> str:
    """The path of a program that `tools/FOLDER.sh` fetches, or that is on PATH; skips the test without it."""
    fetched = ROOT / ".tools" / folder / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    return found or lack(
        f"{name} is neither in .tools/{folder} nor on PATH: tools/{folder.partition('/')[0]}.sh fetches it"
    )


class Server(ABC):
    """A program that serves on 127.0.0.1, with its log and its data in a folder."""

    start_s = START_S
    own_group = False  # whether it has processes of its own, which end with it

    def __init__(self, folder: Path, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._command = command
        self._environ = {"PATH": os.environ.get("PATH", "")} if environ is None else environ
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether it answers."""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start, and wait for nothing."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=self.own_group,
                env=self._environ,
            )

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + self.start_s
        while not self.is_healthy():
            if not self.running or time.monotonic() > deadline:
                log = (self._folder / "log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"{Path(self._command[0]).name} did not start:\n{log}")
            time.sleep(0.05)

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.launch()
        self.wait()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def stop(self, timeout_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process is not None and self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as a lost machine would look. May be called twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            if self.own_group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Delete everything that it has stored; it must not run."""
        assert not self.running
        shutil.rmtree(self._folder / "data", ignore_errors=True)
