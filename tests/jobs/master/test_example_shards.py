"""The example of shards, as its README says: several workers count, one of them is killed, and the sum is right."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.jobs.test_examples import EXAMPLES, commands

DEADLINE_S = 60.0


def test_shards(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(EXAMPLES / "shards", folder, ignore=shutil.ignore_patterns("__pycache__", "counts", "*.csv"))
    environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{tmp_path}/store.sqlite"}
    write, master, count, total = commands(folder / "README.md")
    log = tmp_path / "log"

    def start(command: list[str]) -> subprocess.Popen[str]:
        begin = ["-m", "edl", *command[1:]] if command[0] == "edl" else command[1:]
        with log.open("a") as file:
            return subprocess.Popen(
                [sys.executable, *begin], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def output(process: subprocess.Popen[str]) -> str:
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, log.read_text()
        return text

    output(start([*write[:-1], "4000"]))
    processes = [start(master), start(count)]
    try:
        wait_for_files(folder / "counts", 3, log)
        processes += [start(count), start(count)]
        wait_for_files(folder / "counts", 10, log)
        processes[1].kill()
        workers = [output(process) for process in processes[2:]]
        assert "4,000 units done" in output(processes[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(re.search(r"counted [\d,]+ rows", text) for text in workers)
    text = output(start(total))
    for label, words in expected(folder / "reviews.csv").items():
        ((word, most),) = words.most_common(1)
        assert f"{label}: {sum(words.values()):,} words, most often {word} {most:,}," in text


def wait_for_files(folder: Path, count: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def expected(path: Path) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            counts.setdefault(row["label"], Counter()).update(re.findall(r"[a-z]+", row["sentence"]))
    return counts
