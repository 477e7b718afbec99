"""Runs every benchmark and writes the table that the docs show: `python -m benchmarks`, or `make bench`.

`python -m benchmarks churn --seeds 1` runs one of them, with an option of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks._child import ROOT, processes
from benchmarks._harness import Spread, table

NAMES = (
    *("reader", "counts", "cache", "degradation", "tokens", "heterogeneous", "kill", "balance", "fairness"),
    *(
        "checkpoint",
        "recovery",
        "churn",
        "shards",
        "accuracy_parity",
        "cluster_sim",
        "kube_operator",
        "borrowed_triton",
        "ctr",
    ),
)
_PACKAGES = ("numpy", "grpcio", "protobuf", "torch")
_PAGE = ROOT / "docs/benchmarks.md"
_TIMEOUT_S = 7200.0
"""Time limit of one benchmark, twice what the longest (`churn`) takes: a shorter limit could waste a measurement."""
_ENDING_S = 20.0
_LOOK_S = 0.1

_HEAD = """\
# Benchmarks

`make bench` writes this page; do not edit it. Unless its section says otherwise, a figure is the ratio of the results
of two sides that were measured alternately in one run, or a time in seconds if its name ends in `_s`. The tables show
the median of all rounds, and their range. `benchmarks/NAME.py` runs one benchmark; `python -m benchmarks NAME` also
updates its section here.

Machine: {machine}.
"""


@dataclass(frozen=True)
class Outcome:
    """What one benchmark printed."""

    spreads: dict[str, Spread]
    notes: str


def run(name: str, options: list[str]) -> Outcome:
    """Run one benchmark in a process of its own.

    Raises:
        SystemExit: The benchmark failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--json", "--notes", str(notes), *options]
        # In its own session: otherwise Ctrl-C in a terminal would reach it twice, the second time during its clean-up.
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                printed, _ = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired as exc:
                raise SystemExit(f"benchmarks/{name}.py did not finish within {_TIMEOUT_S:.0f} s: ended") from exc
            finally:
                _end(process)
        if process.returncode:
            raise SystemExit(f"benchmarks/{name}.py failed with exit code {process.returncode}: see above")
        ratios = json.loads(printed)["ratios"]
        return Outcome({key: Spread(**spread) for key, spread in ratios.items()}, notes.read_text().strip())


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark and everything that it started, first like Ctrl-C, so that it can clean up what only it knows.

    Args:
        process: The leader of a process group.
    """
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _ENDING_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_LOOK_S)  # reads its output, without which it might not end
    finally:
        for pid in processes(process.pid) if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine() -> str:
    """Return what a reader needs to judge the figures, and nothing that identifies the machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.machine(),
    )
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in _PACKAGES)
    return f"{os.cpu_count()} cores ({model}), {platform.system()}, Python {platform.python_version()}, {versions}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def section(name: str, outcome: Outcome, module: Any, load: float) -> str:
    """Return a benchmark's section of the page, in Markdown."""
    when = f"Measured on {datetime.date.today():%Y-%m-%d}; load average {load:.1f}."
    parts = [f"## {name}\n", f"{module.__doc__.strip()}\n", table(outcome.spreads, module.GOALS), ""]
    return "\n".join([*parts, *([f"{outcome.notes}\n"] if outcome.notes else []), f"{when}\n"])


def page(before: str, sections: dict[str, str]) -> str:
    """Return the page with these sections replaced, in the order of `NAMES`, without sections of unknown benchmarks."""
    found = re.split(r"^## (\w+)\n", before, flags=re.MULTILINE)[1:]
    kept = {name: f"## {name}\n{text.rstrip()}\n" for name, text in zip(found[::2], found[1::2], strict=True)}
    merged = {**kept, **sections}
    return "\n".join([_HEAD.format(machine=machine()), *(merged[name] for name in NAMES if name in merged)])


def main() -> None:
    """Run the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, help="rounds per benchmark (default: each benchmark's own)")
    parser.add_argument("--quick", action="store_true", help="only check that they all work; write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} (default: all)")
    given, own = parser.parse_known_args()
    if own and len(given.names) != 1:
        parser.error(f"{own[0]}: a benchmark's own options go with one NAME")
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"there is no benchmark {sorted(unknown)[0]!r}; known: {', '.join(NAMES)}")
    options = ["--quick"] if given.quick else []
    options += ["--repeats", str(given.repeats)] if given.repeats else []
    options += own
    for name in given.names or NAMES:
        print(f"{name} ...", flush=True)
        module, load = import_module(f"benchmarks.{name}"), os.getloadavg()[0]
        outcome = run(name, options)
        print(f"{table(outcome.spreads, module.GOALS)}\n", flush=True)
        if not given.quick:
            before = _PAGE.read_text() if _PAGE.exists() else ""
            _PAGE.write_text(page(before, {name: section(name, outcome, module, load)}))
            print(f"written into {_PAGE.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
