"""Trains students of all arms for each seed, one after the other, and writes a file for each run.

A run whose file exists is skipped. `python report.py --runs runs` makes the table and the picture from the files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARMS = ("hard", "off-policy", "on-policy", "killed")
"""Killed is on-policy, with the faults in SCHEDULE."""
SCHEDULE = (
    (0.30, "kill the second teacher"),
    (0.40, "start a teacher"),
    (0.80, "kill the first teacher"),
)
"""Faults of a killed run, by the share of steps completed. The last fault comes while the student learns from its own
text."""
START_S = 900.0
"""vLLM takes half a minute to start on an idle machine, and longer on a busy one."""


class Teachers:
    """A service of two teachers: one is `edl serve --hf`, the other vLLM behind a gateway or another `edl serve`."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.environ = {"OMP_NUM_THREADS": "1"} | os.environ | {"EDL_DISCOVERY": f"sqlite:///{folder}/discovery.sqlite"}
        self.output = folder / "output"
        self.first: list[subprocess.Popen[bytes]] = []  # one teacher's processes, killed together
        self.second: list[subprocess.Popen[bytes]] = []
        self.joined: list[subprocess.Popen[bytes]] = []
        self.ready: dict[int, Path] = {}

    def start(self, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environ | more,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # vLLM runs several processes, which are killed as a group
            )

    def edl(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a teacher, which registers itself soon."""
        ready = self.folder / f"ready-{time.monotonic_ns()}"
        more = ["--model", "code", "--model-version", "r1", "--top-k", str(self.options.top_k), "--ttl", "5s"]
        process = self.start(
            [
                sys.executable,
                "-m",
                "edl",
                *arguments,
                *more,
                "--ready-file",
                str(ready),
                "--exit-with",
                str(os.getpid()),
            ]
        )
        self.ready[process.pid] = ready
        return process

    def serve(self) -> list[subprocess.Popen[bytes]]:
        model = ["--hf", str(self.options.teacher.resolve()), "--task", "causal-lm", "--dtype", "float32"]
        return [self.edl("serve", *model, "--device", "cpu", "--threads", "1")]

    def vllm(self) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        folder = str(self.options.teacher.resolve())
        command = [self.options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--served-model-name", "code", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--max-logprobs", str(self.options.top_k), "--enable-scale-out", *self.options.vllm_options.split()]
        engine = self.start(command, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        gateway = self.edl("register", f"vllm://127.0.0.1:{port}", "--tokenizer", folder, "--engine-wait", "15m")
        return [engine, gateway]

    def start_missing(self) -> None:
        """Restart the teachers that were killed, and stop their replacement."""
        stop(self.joined)
        for name, begin in (("first", self.serve), ("second", self.vllm if self.options.vllm else self.serve)):
            processes = getattr(self, name)
            if not processes or any(process.poll() is not None for process in processes):
                stop(processes)
                setattr(self, name, begin())

    def wait(self) -> None:
        """Wait until both teachers are ready. With only one, a student learns equally well, but the run shows less."""
        deadline = time.monotonic() + START_S
        while not all(self.ready[processes[-1].pid].exists() for processes in (self.first, self.second)):
            is_dead = any(process.poll() is not None for process in (*self.first, *self.second))
            if is_dead or time.monotonic() > deadline:
                raise SystemExit(f"a teacher did not start:\n{self.output.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def kinds(self) -> dict[str, str]:
        """Return the kind of teacher at each endpoint of the service."""
        found = {}
        for processes in (self.first, self.second, self.joined):
            ready = self.ready[processes[-1].pid] if processes else None
            if ready and ready.exists():  # a teacher that joins may not be ready before the run ends
                name = "vLLM" if self.options.vllm and processes is self.second else "edl serve --hf"
                found[json.loads(ready.read_text())["endpoint"]] = name
        return found

    def act(self, action: str) -> None:
        match action:
            case "kill the first teacher":
                kill(self.first[0])
            case "kill the second teacher":
                kill(self.second[0])  # vLLM, whose gateway notices the failure; or `edl serve`
            case "start a teacher":
                self.joined = self.serve()

    def stop(self) -> None:
        for processes in (self.first, self.second, self.joined):
            stop(processes)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its children at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        kill(processes.pop())


def train(arm: str, seed: int, teachers: Teachers, options: argparse.Namespace) -> dict[str, Any]:
    """Train a student and return its results."""
    log, out = teachers.folder / "log", teachers.folder / "out"
    for path in (log, out):
        path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "train_student.py"), "--arm", "on-policy" if arm == "killed" else arm]
    command += ["--seed", str(seed), "--teacher", str(options.teacher.resolve()), "--top-k", str(options.top_k)]
    command += ["--log", str(log), "--out", str(out), *options.student.split()]
    if arm != "hard":
        command += ["--teachers", "code"]
        teachers.wait()
    due, events, deadline = list(SCHEDULE if arm == "killed" else ()), [], time.monotonic() + options.limit_s
    student = teachers.start(command)
    try:
        while student.poll() is None and time.monotonic() < deadline:
            lines = read(log)
            done = lines[-1]["step"] / lines[-1]["of"] if lines else 0.0
            if due and done >= due[0][0]:
                action = due.pop(0)[1]
                teachers.act(action)
                events.append({"time": time.time(), "action": action})
            time.sleep(0.05)
        if due or student.returncode != 0:
            output = teachers.output.read_text(errors="replace")[-3000:]
            raise SystemExit(f"the run did not come to its end (still due: {due}):\n{output}")
    finally:
        stop([student])
    kinds = teachers.kinds() if arm != "hard" else {}
    return json.loads(out.read_text()) | {"arm": arm, "teachers": kinds, "lines": read(log), "events": events}


def read(log: Path) -> list[dict[str, Any]]:
    """Return the entries that a student has logged so far."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the run's processes first
    options.out.mkdir(parents=True, exist_ok=True)
    work = options.out.resolve() / "work"
    work.mkdir(exist_ok=True)
    teachers = Teachers(options, work)
    try:
        for seed in options.seeds:
            for arm in options.arms:
                path = options.out / f"{arm}-{seed}.json"
                if path.exists():
                    continue
                if options.arms != ["hard"]:
                    teachers.start_missing()  # vLLM starts slowly: the student without teachers trains first
                result = train(arm, seed, teachers, options)
                draft = path.with_suffix(".unfinished")
                draft.write_text(json.dumps(result))
                draft.rename(path)
                print(f"{arm}, seed {seed}: perplexity {result['perplexity']:.2f}", flush=True)
    finally:
        teachers.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--teacher", type=Path, default=Path("teacher"), help="folder that train_teacher.py wrote (%(default)s)"
    )
    parser.add_argument("--vllm", default="", help="a Python with vLLM installed, which serves the second teacher")
    parser.add_argument("--vllm-options", default="--enforce-eager --max-model-len 256 --gpu-memory-utilization 0.1")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--student", default="", help="more options for train_student.py, in quotes")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the runs' files")
    parser.add_argument("--limit-s", type=float, default=3600, help="stop a run that takes longer than this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
