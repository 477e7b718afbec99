"""A real teacher in its own process, which a test can kill, pause and drain."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from typing_extensions import Self

from edl.errors import ClosedError, EDLError

_POLL_S = 0.01
"""Interval between checks for a file or a process state: starting a teacher takes a second or more."""
_STOP_S = 10.0
"""How long the kernel may take to stop a process: this takes milliseconds, unless the process waits for a disk."""


class LocalTeacher:
    """An `edl serve` process on a free port of this machine, which is ready when the constructor returns.

    The teacher's process ends at `close`, at the end of the `with` block, when the object is garbage-collected, or when
    this process ends, even if SIGKILL ends this process.

    Args:
        target: name of a model in `edl.testing.models`; or a model in the format of `edl serve --factory`:
            `package.module:name` or `path/file.py:name`. Empty if `serve` names the model.
        name: the model's name in requests.
        service, discovery: the service's name, and the store to register in. Without a service, the teacher does not
            register.
        port: TCP port; 0 for a free port.
        max_batch, max_queue: limits in rows; None for the server's defaults.
        serve: additional flags for `edl serve`, without the dashes: `{"threads": 1, "max-delay": "2ms"}`. A bool turns
            a flag on or off, a list repeats the flag, and a mapping repeats the flag with `key=value`.
        env: additional environment variables. This process's variables are inherited, except those for TLS and tokens.
        wait: False to return at once; call `wait_ready` later. With False, several teachers start faster.
        timeout_s: seconds that the teacher may take to become ready.
        options: arguments of the factory.

    Raises:
        EDLError: the process ended, or was not ready in time. The message contains the end of its log.
    """

    def __init__(
        self,
        target: str = "echo",
        *,
        name: str = "m",
        service: str = "",
        discovery: str = "",
        port: int = 0,
        max_batch: int | None = None,
        max_queue: int | None = None,
        serve: Mapping[str, Any] | None = None,
        env: dict[str, str] | None = None,
        wait: bool = True,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        # Neither stays on disk, however this process ends: the log has no name, and the teacher's ready file is
        # deleted once it is read, or by the teacher.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
        self._last_log = ""
        self._ready_file = Path(tempfile.gettempdir()) / f"edl-teacher-{os.getpid()}-{secrets.token_hex(8)}"
        self._timeout_s = timeout_s
        self._ready: dict[str, Any] | None = None
        flags: dict[str, Any] = {"model": name, "port": port, "ttl": "2s", "option": _as_json(options)}
        if target:
            flags["factory"] = target if ":" in target else f"edl.testing.models:{target}"
        if service:
            flags["service"] = service
        if discovery or not service:
            flags["discovery"] = discovery or "none"
        flags |= {name: rows for name, rows in (("max-batch", max_batch), ("max-queue", max_queue)) if rows is not None}
        flags |= {**(serve or {}), "ready-file": self._ready_file, "exit-with": os.getpid()}
        command = [sys.executable, "-m", "edl", "serve", *_arguments(flags)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**_without_credentials(os.environ), **(env or {})},
        )
        self._finalizer = weakref.finalize(self, _end, self._process, self._log, self._ready_file, os.getpid())
        if wait:
            try:
                self.wait_ready(timeout_s)
            except BaseException:
                self.close()
                raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def endpoint(self) -> str:
        """The address as `host:port`, for students."""
        return str(self._when_ready()["endpoint"])

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._when_ready()["port"])

    @property
    def metrics_port(self) -> int | None:
        """The port of `/metrics`; None unless `serve` contains a flag for this port."""
        port = self._when_ready()["metrics_port"]
        return None if port is None else int(port)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The process's output so far."""
        if self._log.closed:
            return self._last_log
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def is_alive(self) -> bool:
        """Whether the process is running or paused."""
        return self.returncode is None

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the teacher serves and is registered.

        Args:
            timeout_s: seconds that the wait may take; None for the constructor's `timeout_s`.

        Raises:
            EDLError: The teacher ended, or `timeout_s` passed.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while self._ready is None:
            with contextlib.suppress(FileNotFoundError):
                self._ready = json.loads(self._ready_file.read_text())
                self._ready_file.unlink()
                return
            if not self._finalizer.alive:
                raise ClosedError("this teacher was closed")
            if (code := self.returncode) is not None:
                raise EDLError(f"the teacher ended with code {code} before it was ready:\n{self.log[-3000:]}")
            if time.monotonic() > deadline:
                raise EDLError(f"the teacher was not ready within {timeout_s:g} s:\n{self.log[-3000:]}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Open requests are lost."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM and return: the teacher leaves discovery, finishes accepted requests, and exits. See `wait`."""
        self._process.terminate()

    def pause(self) -> None:
        """Send SIGSTOP, and wait until the process stops. It keeps its connections but does nothing; its lease expires.

        Raises:
            TimeoutError: the process has not stopped after 10 s.
        """
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_S
        seen = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self.is_alive() and os.waitid(os.P_PID, self.pid, seen) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the teacher has not stopped after {_STOP_S:g} s")
            time.sleep(_POLL_S)

    def resume(self) -> None:
        """Send SIGCONT, so that the process continues after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until the process has ended.

        Args:
            timeout_s: how many seconds the wait may take.

        Returns:
            The process's exit code, negative for a signal.

        Raises:
            TimeoutError: the process is still running after `timeout_s`.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the teacher is still running after {timeout_s:g} s:\n{self.log[-3000:]}") from None

    def close(self) -> None:
        """End the process at once, in any state. May be called twice."""
        self._last_log = self.log
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._ready["endpoint"] if self._ready else "not ready"
        return f"<LocalTeacher {where}, pid {self.pid}>"

    def _when_ready(self) -> dict[str, Any]:
        self.wait_ready()
        assert self._ready is not None
        return self._ready


def _without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the student's credentials: with a CA set, a teacher would need a certificate."""
    return {key: value for key, value in environ.items() if not key.startswith(("EDL_TLS_", "EDL_TOKEN"))}


def _as_json(options: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in options.items()}


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as command-line arguments in the form `--name=value`, so that a value may begin with a dash."""
    arguments: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            arguments += [f"--{name}={key}={item}" for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{name}={item}" for item in value]
        else:
            arguments.append(f"--{name}={value}")
    return arguments


def _end(process: subprocess.Popen[bytes], log: IO[bytes], ready_file: Path, owner: int) -> None:
    """End the process. SIGKILL also ends a paused process. A forked child of the owner must not end the process."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    log.close()
    ready_file.unlink(missing_ok=True)
