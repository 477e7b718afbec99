"""Runs the tests, tier by tier; the path of a test says its tier, and so what it needs.

    python -m tests                     tests/fast: needs only Python packages
    python -m tests services jobs       these tiers
    python -m tests all                 fast, services, jobs, kubernetes
    python -m tests lint                tests/lint: the repository's tests of itself, part of `make lint`
    python -m tests all --record        and writes how long each file took into tests/durations.json
    python -m tests fast -k reader -x   a part of a tier; everything after the tiers goes to pytest
    python -m tests tests/jobs/master   the tests of a folder or file, in the way of their tier
    python -m tests jobs --workers 1    as many processes side by side

Tests of the fast tier run in random order, and never twice. In the other tiers the longest files start first, and a
failed test runs once more: `tests/plugins_reporting.py` lists the retried tests, and fails a run that has more than
three. `python -m pytest PATH` works as well, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.plugins_reporting import DURATIONS, read_durations

ROOT = DURATIONS.parent.parent
USAGE = "python -m tests [TIER ...] [--record] [--workers N] [PATH ...] [options of pytest]; --help says more"
INTERRUPTED = 2  # pytest.ExitCode.INTERRUPTED
NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED
FILES_TOGETHER = ("--dist", "loadfile", "--no-loadscope-reorder")
"""A file's tests stay in one process, which shares their fixtures, and files start in the order of conftest.py."""
VALUED = ("-k", "-m", "-p", "-n", "-c", "-o", "-W", "--deselect", "--ignore", "--maxfail", "--reruns", "--workers")
"""Options whose value may be the next word, which is no path then."""
NOT_RANDOM = ("-p", "no:randomly", "--reruns", "1")

TIERS: dict[str, list[list[str]]] = {
    "fast": [["tests/fast"]],
    "services": [["tests/services", *NOT_RANDOM]],
    "jobs": [["tests/jobs", *NOT_RANDOM]],
    # Tests that stop a node or the API server disturb all others on the same cluster.
    "kubernetes": [
        ["tests/kubernetes", *NOT_RANDOM, "-m", "not alone"],
        ["tests/kubernetes", *NOT_RANDOM, "-m", "alone"],
    ],
}
LINT = [["tests/lint", "-p", "no:randomly"]]


def main(arguments: Sequence[str]) -> int:
    """Run the tiers that the arguments name, the later ones also where an earlier one failed."""
    rest = list(arguments)
    if "-h" in rest or "--help" in rest:
        print(__doc__)
        return 0
    names = []
    while rest and rest[0] in (*TIERS, "lint", "all"):
        names.append(rest.pop(0))
    if "all" in names:
        names = list(TIERS)
    parser = argparse.ArgumentParser(prog="python -m tests", add_help=False, allow_abbrev=False, usage=USAGE)
    parser.add_argument("--record", action="store_true")
    options, rest = parser.parse_known_args(rest)
    if options.record and rest:
        parser.error(f"--record is for whole tiers: leave out {' '.join(rest)}")
    paths = [word for at, word in enumerate(rest) if _is_path(word, rest[at - 1] if at else "")]
    for path in paths:
        if not (ROOT / path.partition("::")[0]).exists():
            parser.error(f"there is no tier and no path {path!r} in {ROOT}")
    rest = [word for word in rest if word not in paths]
    names = names or _tiers_of(paths) or ["fast"]
    parts = [(name, part) for name in names for part in TIERS.get(name, LINT)]
    if paths:
        parts = [(name, [*inside, *part[1:]]) for name, part in parts if (inside := _inside(paths, name))]
    if not parts:
        parser.error(f"{' '.join(paths)}: not in {' or '.join(f'tests/{name}' for name in names)}")
    ends: list[PartEnd] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts:
            ends.append(_run_part(name, part, rest, Path(folder) / f"{len(ends)}.json"))
            if ends[-1].interrupted:
                return INTERRUPTED
    if options.record:
        _record([end.report["seconds"] for end in ends])
    if len(ends) > 1:
        _print_all(ends)
    # A part of a tier may have none of the tests that were chosen, unless no tier has one.
    chosen = bool(rest) and any(end.code == 0 for end in ends)
    return next((end.code for end in ends if end.code and not (chosen and end.code == NO_TESTS)), 0)


def _is_path(word: str, before: str) -> bool:
    return not word.startswith("-") and (before not in VALUED)


def _tiers_of(paths: Sequence[str]) -> list[str]:
    return [name for name in (*TIERS, "lint") if _inside(paths, name)]


def _inside(paths: Sequence[str], name: str) -> list[str]:
    """Return the paths in a tier."""
    folder = ROOT / "tests" / name
    return [path for path in paths if (ROOT / path.partition("::")[0]).resolve().is_relative_to(folder)]


@dataclass(frozen=True)
class PartEnd:
    """How a part of a tier ended, and what its plugin reported."""

    name: str
    code: int
    seconds: float
    report: dict[str, Any]
    interrupted: bool


def _run_part(name: str, part: Sequence[str], rest: Sequence[str], report: Path) -> PartEnd:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Most tests wait for sockets and processes much of their time; jobs have several processes each.
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default={"fast": 2 * cores, "jobs": cores + 1}.get(name, cores))
    options, arguments = parser.parse_known_args([*part, *rest])
    if "alone" in part:
        options.workers = 1
    if "-m" in part and "-m" in rest:
        chosen = rest[rest.index("-m") + 1]
        arguments += ["-m", f"({part[part.index('-m') + 1]}) and ({chosen})"]
    # A process that dies ends the run with the name of its test: after a restart, `--dist loadfile` can wait for ever.
    several = ["-n", str(options.workers), *FILES_TOGETHER, "--max-worker-restart", "0"]
    beside = several if options.workers > 1 else []
    print(f"{name}: python -m pytest {' '.join([*arguments, *beside])}", flush=True)
    begin, interrupted = time.monotonic(), False
    command = [sys.executable, "-m", "pytest", "-q", *arguments, *beside, "--report-file", str(report)]
    process = subprocess.Popen(command, cwd=ROOT)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # pytest has got it from the terminal as well, and ends what its tests have started
            interrupted = True
    seconds = time.monotonic() - begin
    try:
        reported = json.loads(report.read_text())
    except (OSError, ValueError):
        reported = {"seconds": {}, "retried": [], "skipped": []}
        if code == 0:
            print(f"{name}: pytest has ended before its time: a test may have called os._exit(0)")
            code = 1
    print(f"{name}: {seconds:.0f} s, exit code {code}\n", flush=True)
    return PartEnd(name, code, seconds, reported, interrupted)


def _print_all(ends: Sequence[PartEnd]) -> None:
    for end in ends:
        result = "passed" if end.code == 0 else "no tests" if end.code == NO_TESTS else f"failed, exit code {end.code}"
        print(f"{end.name:12} {end.seconds:6.0f} s  {result}")
        for kind in ("retried", "skipped"):
            for line in end.report[kind]:
                print(f"{'':12} {kind}: {line}")


def _record(reports: Sequence[dict[str, float]]) -> None:
    """Write the seconds of each file that ran, the longest first, and keep those of files that did not."""
    seconds: dict[str, float] = {}
    for report in reports:
        for file, spent in report.items():
            seconds[file] = seconds.get(file, 0.0) + spent
    before = read_durations()
    # One and the same file differs by about a second from run to run.
    merged = {file: round(spent) for file, spent in (before | seconds).items() if (ROOT / file).exists()}
    ordered = sorted(
        ((file, spent) for file, spent in merged.items() if spent), key=lambda entry: (-entry[1], entry[0])
    )
    written = DURATIONS.with_suffix(".new")  # a full disk leaves the old file as it is
    written.write_text(json.dumps(dict(ordered), indent=0) + "\n")
    written.replace(DURATIONS)
    print(f"tests/{DURATIONS.name} has the seconds of {len(ordered)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
