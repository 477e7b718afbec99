"""Trains a teacher and all its students for each seed, one after the other, and writes results to results.jsonl.

If it is stopped or killed, it continues where it was when you run it again.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from edl.discovery import open_registry

STUDENTS = {
    "bow": ["train_student_paddle.py", "--net", "bow"],
    "cnn": ["train_student.py", "--net", "cnn"],
    "lstm": ["train_student.py", "--net", "lstm"],
}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", help="folder with train.tsv, dev.tsv and test.tsv (default: made-up sentences)")
parser.add_argument("--labelled", default="500")
parser.add_argument("--unlabelled", default="3000")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
parser.add_argument("--steps", default="400", help="steps of each student")
parser.add_argument("--epochs", default="5", help="epochs of the teacher")
parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for teachers and registry (%(default)s)")
parser.add_argument("--results", type=Path, default=Path("results.jsonl"))
options = parser.parse_args()
options.work.mkdir(exist_ok=True)
registry_url = f"sqlite:///{options.work.resolve()}/registry.sqlite"


def is_done(**run: object) -> bool:
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    return any(run.items() <= json.loads(line).items() for line in lines)


@contextlib.contextmanager
def two_teachers(folder: str, service: str) -> Iterator[None]:
    """Serve a folder with two teachers until the block ends."""
    command = [sys.executable, "-m", "edl", "serve", "--hf", folder, "--task", "sequence-classification"]
    command += ["--model", service, "--store", registry_url]
    log_path = options.work / f"{service}.log"
    with log_path.open("ab") as log:
        servers = [subprocess.Popen(command, stdout=log, stderr=log) for _ in range(2)]
    try:
        deadline = time.monotonic() + 300
        with open_registry(registry_url) as registry:
            while len(registry.snapshot(service).instances) < 2:
                if time.monotonic() > deadline or any(server.poll() is not None for server in servers):
                    raise SystemExit(f"the teachers did not start: see {log_path}")
                time.sleep(0.1)
        yield
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


for seed in options.seeds:
    folder, service = f"{options.work}/teacher{seed}", f"sentiment{seed}"
    data = ["--labelled", options.labelled, "--unlabelled", options.unlabelled, "--seed", str(seed)]
    data += ["--results", str(options.results), *(["--data", options.data] if options.data else [])]

    def run(*command: str, of_seed: tuple[str, ...] = tuple(data)) -> None:
        subprocess.run([sys.executable, *command, *of_seed], check=True)

    if not is_done(model="teacher", seed=seed):
        run("train_teacher.py", "--out", folder, "--epochs", options.epochs)
    with two_teachers(folder, service):
        for net, command in STUDENTS.items():
            for taught in (False, True):
                for more_text in (False, True):
                    if not is_done(model=net, seed=seed, taught=taught, more_text=more_text):
                        named = ["--teachers", service, "--store", registry_url, "--cache"] if taught else []
                        more = ["--more-text"] if more_text else []
                        run(*command, *named, *more, "--tokenizer", folder, "--steps", options.steps)
