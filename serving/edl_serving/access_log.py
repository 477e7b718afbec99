"""The access log: a line of JSON for a request, in a file or on standard output.

A thread writes the lines, since a disk or a pipe may be slow, or hang, and neither the event loop nor the end of the
process may wait for it. A line says how many lines before it were dropped because the thread could not keep up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections import deque
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from edl.errors import SettingsError
from edl_serving.batching.batch_queue import InferenceJob

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000  # lines: some seconds of requests, and 5 MB; with more a disk that hangs would fill the memory
_GATHER_S = 0.05  # lines are gathered for this long: a wake-up of the thread for each would cost more than the line
_CLOSE_S = 2.0  # how long the end of the process waits for the last lines


class AccessLog:
    """Writes lines until `close`.

    A file that was moved or deleted is opened anew, so `logrotate` needs to do no more than that.
    """

    def __init__(self, path: str, model: str, version: str) -> None:
        self._path = path
        self._common = {"model": model, "version": version}
        self._lines: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._failing = False
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._file: FileIO | None = None
        try:
            self._file = self._open()
        except OSError as exc:
            why = "nobody reads this pipe" if exc.errno == errno.ENXIO else exc.strerror or exc
            raise SettingsError(f"--access-log {path!r}: cannot be written: {why}") from exc
        # Not a `BackgroundLoop`: a set event costs a request less than a wake-up, and what waits is written at the end.
        self._thread = threading.Thread(target=self._run, name="edl-access-log", daemon=True)
        self._thread.start()

    def write_request(self, job: InferenceJob | None, status: str, **fields: Any) -> None:
        """Write a line. Not thread-safe."""
        if len(self._lines) >= _MOST_WAITING:
            self._dropped += 1
            return
        line: dict[str, Any] = {"time": time.time(), **fields, **self._common, "status": status}
        if job is not None:
            ended = job.ended or time.monotonic()
            line["rows"] = job.rows
            line["queue_ms"] = round(((job.started or ended) - job.arrived) * 1000, 3)
            line["compute_ms"] = round((ended - job.started) * 1000, 3) if job.started else 0.0
        if self._dropped:
            line["dropped"] = self._dropped  # before this line
            self._dropped = 0
        self._lines.append(line)
        if not self._changed.is_set():
            self._changed.set()

    def close(self) -> None:
        """Write the lines that wait and end the thread, or give up after 2 s on a file that hangs."""
        self._closing.set()
        self._changed.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("the access log %r hangs; its last lines are lost", self._path)

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._lines):
            self._changed.wait()
            self._closing.wait(_GATHER_S)
            self._changed.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            self._write(b"".join(map(_encoded, lines)))
            if self._closing.is_set():
                self._changed.set()
        self._close_file()

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None or self._was_rotated(self._file):
                self._close_file()
                self._file = self._open()
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as exc:
            if not self._failing:
                self._failing = True
                _log.error("the access log %r cannot be written: %s", self._path, exc.strerror or exc)
            self._close_file()
            return
        if self._failing:
            self._failing = False
            _log.warning("the access log %r is written again", self._path)

    def _open(self) -> FileIO:
        # Not standard output's buffer: a thread that hangs would keep its lock when the process ends.
        return FileIO(os.dup(1), "w") if self._path == "-" else FileIO(self._path, "a", opener=_open_at_once)

    def _was_rotated(self, file: FileIO) -> bool:
        if self._path == "-":
            return False
        try:
            found, ours = Path(self._path).stat(), os.fstat(file.fileno())
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a reader raises ENXIO, where `open` alone would wait for a reader."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file


def _encoded(line: dict[str, Any]) -> bytes:
    moment = datetime.fromtimestamp(line["time"], timezone.utc)
    return json.dumps({**line, "time": moment.isoformat(timespec="milliseconds")}).encode() + b"\n"
