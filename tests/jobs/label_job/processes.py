"""Processes of `edl label --job`, and teachers that write down which rows they were asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edl.discovery import open_store
from edl.testing import LocalTeacher

MODEL = """
import os
import time
import numpy as np

FILE = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
HURRY = {file!r} + ".hurry"
BAD = {bad!r}

def model(inputs):
    x = inputs["x"]
    rows = x[x[:, 1] == 7, 0].astype(np.int32)  # and not those with which the server tries the model
    if set(rows.tolist()) & set(BAD):
        raise ValueError("this row is bad")
    os.write(FILE, rows.tobytes())
    time.sleep(0 if os.path.exists(HURRY) else {row_s!r} * len(rows))
    return {{"y": np.stack([x[:, 0] * {scale!r}, x[:, 0] + 1], axis=1)}}
"""


class Asked:
    """The rows that a teacher was asked for, in a file that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "asked.bin"
        self._hurry = folder / "asked.bin.hurry"

    def hurry(self) -> None:
        """Have teachers wait no longer for each row."""
        self._hurry.touch()

    def rows(self) -> Counter[int]:
        return Counter(np.fromfile(self.file, np.int32).tolist()) if self.file.exists() else Counter()


def counting_teacher(
    folder: Path, *, row_s: float = 0.0, scale: float = 2.0, version: str = "1", bad: Sequence[int] = (), **more: Any
) -> LocalTeacher:
    path = folder / f"model_{os.urandom(4).hex()}.py"
    path.write_text(MODEL.format(file=str(Asked(folder).file), bad=list(bad), row_s=row_s, scale=scale))
    return _teacher(path, version, **more)


def _teacher(path: Path, version: str, **more: Any) -> LocalTeacher:
    serve = {"callable": f"{path}:model", "input": "x:fp32[2]", "model-version": version}
    return LocalTeacher("", serve=serve, wait=False, **more)


def write_data(path: Path, rows: int) -> None:
    """Row i is [i + 1, 7]."""
    x = np.full((rows, 2), 7, np.float32)
    x[:, 0] = np.arange(1, rows + 1)
    np.savez(path, x=x)


class Worker:
    """An `edl label --job` process; its output goes to files that can be looked at while it runs."""

    def __init__(self, folder: Path, arguments: Sequence[str], name: str) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [sys.executable, "-m", "edl", "label", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait(10)

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)


class Run:
    """A job: its data, store, folders and workers."""

    def __init__(self, folder: Path, teachers: Sequence[LocalTeacher], rows: int) -> None:
        self.folder = folder
        self.data = folder / "data.npz"
        self.store = f"sqlite:///{folder}/store.sqlite"
        self.asked = Asked(folder)
        self.workers: list[Worker] = []
        self.teachers = teachers
        write_data(self.data, rows)
        self.rows = rows

    def arguments(self, output: str = "labels", *more: str) -> list[str]:
        for teacher in self.teachers:
            teacher.wait_ready()
        endpoints = ",".join(teacher.endpoint for teacher in self.teachers)
        first = [str(self.data), "--inputs", "x", "--outputs", "y", "--output", str(self.folder / output)]
        return [*first, "--teachers", endpoints, "--job", "numbers", "--store", self.store, *more]

    def start(self, *more: str, output: str = "labels") -> Worker:
        return self.start_as(self.arguments(output, *more))

    def start_as(self, arguments: Sequence[str]) -> Worker:
        self.workers.append(Worker(self.folder, arguments, f"worker-{len(self.workers)}"))
        return self.workers[-1]

    def restart_teacher(self, path: Path, port: int) -> None:
        self.teachers = [_teacher(path, "1", port=port)]

    def report(self) -> dict[str, Any]:
        """What the job's master has reported; empty if there is nothing yet."""
        with open_store(self.store) as store:
            entry = store.get("master_reports/numbers")
        return dict(json.loads(entry.value)) if entry is not None else {}

    def labels(self) -> dict[str, Any]:
        return dict((self.report().get("datasets") or [{}])[0])

    def done(self) -> int:
        return int(self.labels().get("units_done", 0))

    def leases_of(self, worker: Worker) -> int:
        holders = self.labels().get("holders", ())
        return sum(holder["leases"] for holder in holders if holder["holder"].endswith(f":{worker.pid}"))

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        for teacher in self.teachers:
            teacher.close()
