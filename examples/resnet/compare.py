"""Trains students on labels alone, distilled, and distilled while teachers and a node are killed.

It also measures the speed of a student on half of the cores, alone and while teachers use the other half.

It writes a file for each run, and skips runs whose file exists. `python report.py` makes the table and the picture
from the files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EDL = [sys.executable, "-m", "edl"]
ARMS = ("hard", "distilled", "killed")
SPEEDS = ("alone", "remote")
# What happens in a killed run, by the share of steps completed.
SCHEDULE = (
    (0.10, "kill a teacher"),
    (0.20, "start a teacher"),
    (0.30, "kill a node"),
    (0.40, "kill all teachers"),
    (0.40, "start a teacher"),
    (0.50, "start a node"),
    (0.60, "start a teacher"),
    (0.75, "drain a teacher"),
)


class Run:
    """The processes of a run: the student's nodes under `edl run`, and the teachers under `edl serve`."""

    def __init__(self, folder: Path, options: argparse.Namespace, student: list[str]) -> None:
        self.log, self.output = folder / "log", folder / "output"
        self.environ = {"OMP_NUM_THREADS": "1"} | os.environ | {"EDL_DISCOVERY": f"sqlite:///{folder}/discovery.sqlite"}
        self.student = [*EDL, "run", "--nnodes", "1:2", "--rdzv-id", "student", "--lease-ttl", str(options.lease_ttl)]
        self.student += ["train.py", "--log", str(self.log), *student]
        facts = json.loads(options.teacher.with_suffix(".json").read_text())
        size = facts["size"]
        self.teacher = [*EDL, "serve", "--torch-factory", "nets.py:build", "--option", f"arch={facts['arch']}"]
        self.teacher += ["--option", f"classes={facts['classes']}", "--checkpoint", str(options.teacher.resolve())]
        self.teacher += ["--input", f"image:uint8[3,{size},{size}]", "--output", "logits", "--normalize", "imagenet"]
        self.teacher += ["--autocast", "bfloat16", "--model", "teacher"]
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.teachers: list[subprocess.Popen[bytes]] = []
        self.events: list[dict[str, Any]] = []
        self.cores: dict[str, list[int]] = {}

    def part_cores(self) -> None:
        """Give the student and the teachers half of the cores each, as if they were on two machines."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == 1:
            raise SystemExit("a single core cannot be divided: leave `alone` and `remote` out of --arms")
        half = len(cores) // 2
        self.cores = {"run": cores[:half], "serve": cores[half:]}

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            process = subprocess.Popen(command, cwd=HERE, env=self.environ, stdout=output, stderr=output)
        if self.cores:
            os.sched_setaffinity(process.pid, self.cores[command[len(EDL)]])  # before it has threads or children
        return process

    def do_action(self, action: str) -> None:
        match action:
            case "start a teacher":
                self.teachers.append(self.start(self.teacher))
            case "drain a teacher":
                self.teachers[0].terminate()
            case "kill a teacher":
                self.teachers.pop(0).kill()
            case "kill all teachers":
                while self.teachers:
                    self.teachers.pop().kill()
            case "start a node":
                self.nodes.append(self.start(self.student))
            case "kill a node":
                self.nodes.pop().kill()
        self.events.append({"time": time.time(), "action": action})

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the lines that the student has logged so far."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def follow(self, schedule: tuple[tuple[float, str], ...], limit_s: float) -> list[dict[str, Any]]:
        """Wait for the student, and carry out each scheduled action when the student has reached its step."""
        due, deadline = list(schedule), time.monotonic() + limit_s
        while self.nodes[0].poll() is None:  # if the other node is late, it finds that the job has ended
            lines = self.read_lines()
            done = lines[-1]["step"] / lines[-1]["of"] if lines else 0.0
            while due and done >= due[0][0]:
                self.do_action(due.pop(0)[1])
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if due or self.nodes[0].returncode != 0:
            raise SystemExit(f"the run did not come to its end:\n{self.output.read_text()[-3000:]}")
        return self.read_lines()

    def stop(self) -> None:
        for process in self.nodes + self.teachers:
            process.kill()
            process.wait()


def train(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a student and return its results."""
    data = options.data if options.data == "digits" else str(Path(options.data).resolve())
    epochs = min(options.epochs, 3) if arm in SPEEDS else options.epochs
    student = ["--data", data, "--images", str(options.images), "--epochs", str(epochs)]
    student += ["--seed", str(seed), *options.student.split()]
    taught = arm not in ("hard", "alone")
    if taught:
        student += ["--teachers", "teacher"]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options, student)
        if arm in SPEEDS:
            run.part_cores()
        try:
            for action in ("start a teacher", "start a teacher") if taught else ():
                run.do_action(action)
            for _ in range(2 if arm == "killed" else 1):
                run.do_action("start a node")
            lines = run.follow(SCHEDULE if arm == "killed" else (), options.limit_s)
        finally:
            run.stop()
    return {"arm": arm, "seed": seed, "accuracy": lines[-1]["accuracy"], "lines": lines, "events": run.events}


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the run's processes first
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for arm in options.arms:
            path = options.out / f"{arm}-{seed}.json"
            if path.exists():
                continue
            result = train(arm, seed, options)
            draft = path.with_suffix(".unfinished")
            draft.write_text(json.dumps(result))
            draft.rename(path)
            print(f"{arm}, seed {seed}: {result['accuracy']:.1%} right", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help='a folder, or "digits"')
    parser.add_argument("--teacher", type=Path, default=Path("teacher.pt"), help="weights that train_teacher.py wrote")
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *SPEEDS], choices=[*ARMS, *SPEEDS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--images", type=int, default=0, help="number of images to train students on (default: all)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--student", default="", help="more options for train.py, in quotes")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the runs' files")
    parser.add_argument(
        "--lease-ttl", type=float, default=5, help="edl run's --lease-ttl; raise it on a shared machine"
    )
    parser.add_argument("--limit-s", type=float, default=3600, help="stop a run that takes longer than this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
