"""Runs the tests, tier by tier; the path of a test says its tier, and so what it needs.

    python -m tests                     tests/fast: needs only Python packages
    python -m tests services jobs       these tiers
    python -m tests all                 fast, services, jobs, kubernetes
    python -m tests lint                tests/lint: the repository's tests of itself, part of `make lint`
    python -m tests all --record        and writes how long each file took into tests/durations.json
    python -m tests fast -k reader -x   a part of a tier; everything after the tiers goes to pytest
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
from pathlib import Path

from tests.plugins_reporting import DURATIONS

INTERRUPTED = 2  # pytest.ExitCode.INTERRUPTED
NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED
FILES_TOGETHER = ("--dist", "loadfile", "--no-loadscope-reorder")
"""A file's tests stay in one process, which shares their fixtures, and files start in the order of conftest.py."""
NOT_RANDOM = ("-p", "no:randomly", "--reruns", "1")

TIERS: dict[str, list[list[str]]] = {
    "fast": [["tests/fast"]],
    "services": [["tests/services", *NOT_RANDOM]],
    "jobs": [["tests/jobs", *NOT_RANDOM]],
    # Tests that stop a node or the API server disturb all others on the same cluster.
    "kubernetes": [
        ["tests/kubernetes", *NOT_RANDOM, "-m", "not alone"],
        ["tests/kubernetes", *NOT_RANDOM, "-m", "alone", "--workers", "1"],
    ],
}


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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--record", action="store_true")
    options, rest = parser.parse_known_args(rest)
    if options.record and rest:
        parser.error(f"--record is for whole tiers: leave out {' '.join(rest)}")
    codes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        reports: list[Path] = []
        for name in names or ["fast"]:
            for part in TIERS.get(name, [["tests/lint", "-p", "no:randomly"]]):
                reports.append(Path(folder) / f"{len(reports)}.json")
                codes.append(_run_part(name, part, rest, reports[-1]))
                if codes[-1] == INTERRUPTED:
                    return INTERRUPTED
        if options.record:
            _record([report for report in reports if report.exists()])
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    if failed:
        return failed[0]
    return 0 if 0 in codes else NO_TESTS


def _run_part(name: str, part: Sequence[str], rest: Sequence[str], report: Path) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Most tests wait for sockets and processes much of their time; jobs have several processes each.
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default={"fast": 2 * cores, "jobs": cores + 1}.get(name, cores))
    options, arguments = parser.parse_known_args([*rest, *part])
    beside = ["-n", str(options.workers), *FILES_TOGETHER] if options.workers > 1 else []
    print(f"{name}: python -m pytest {' '.join([*arguments, *beside])}", flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", *arguments, *beside, "--report-file", str(report)]
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{name}: {time.monotonic() - begin:.0f} s, exit code {code}\n", flush=True)
    return code


def _record(reports: Sequence[Path]) -> None:
    """Write the seconds of each file that ran, the longest first, and keep those of files that did not."""
    seconds: dict[str, float] = {}
    for report in reports:
        for file, spent in json.loads(report.read_text())["seconds"].items():
            seconds[file] = seconds.get(file, 0.0) + spent
    before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    root = DURATIONS.parent.parent
    # One and the same file differs by about a second from run to run.
    merged = {file: round(spent) for file, spent in (before | seconds).items() if (root / file).exists()}
    ordered = sorted(
        ((file, spent) for file, spent in merged.items() if spent), key=lambda entry: (-entry[1], entry[0])
    )
    DURATIONS.write_text(json.dumps(dict(ordered), indent=0) + "\n")
    print(f"tests/{DURATIONS.name} has the seconds of {len(ordered)} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
