"""Runs every benchmark and writes the table that the docs show: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks._child import ROOT
from benchmarks._harness import Spread, table

NAMES = ("reader", "degradation", "heterogeneous", "kill", "balance")
_PACKAGES = ("numpy", "grpcio", "protobuf", "torch")
_PAGE = ROOT / "docs/benchmarks.md"
_TIMEOUT_S = 3600.0

_HEAD = """\
# Benchmarks

Written by `make bench`; do not edit. Each figure is a ratio of two sides that took turns in one run, or seconds for a
key that ends in `_s`: the median of {repeats} rounds, the lowest and the highest. `benchmarks/NAME.py` runs one alone
(`--help` has its options, `--json` prints one line).

Machine: {machine}; load average before the run {load:.1f} (0 is a machine with nothing else to do).
"""


@dataclass(frozen=True)
class Outcome:
    """What one benchmark printed."""

    spreads: dict[str, Spread]
    notes: str


def run(name: str, options: list[str]) -> Outcome:
    """Run one benchmark in a process of its own.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--json", "--notes", str(notes), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"benchmarks/{name}.py failed:\n{done.stderr}")
        ratios = json.loads(done.stdout)["ratios"]
        return Outcome({key: Spread(**one) for key, one in ratios.items()}, notes.read_text().strip())


def machine() -> str:
    """What a reader needs to judge the figures, and nothing that names the machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.machine(),
    )
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in _PACKAGES)
    return (
        f"{os.cpu_count()} cores ({model}), {platform.system()}, Python {platform.python_version()}, {versions}; "
        f"{datetime.date.today():%Y-%m-%d}"
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def page(outcomes: dict[str, Outcome], modules: dict[str, Any], repeats: str, load: float) -> str:
    """The page, in Markdown."""
    parts = [_HEAD.format(repeats=repeats, machine=machine(), load=load)]
    for name, outcome in outcomes.items():
        parts += [f"## {name}\n", f"{modules[name].__doc__.strip()}\n", table(outcome.spreads, modules[name].GOALS), ""]
        if outcome.notes:
            parts.append(f"{outcome.notes}\n")
    return "\n".join(parts)


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeats", type=int, help="rounds of each (default: each benchmark's own)")
    parser.add_argument("--quick", action="store_true", help="only show that they all work; nothing is written")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; nothing is written then")
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"there is no benchmark {sorted(unknown)[0]!r}; known: {', '.join(NAMES)}")
    options = ["--quick"] if given.quick else []
    options += ["--repeats", str(given.repeats)] if given.repeats else []
    modules = {name: import_module(f"benchmarks.{name}") for name in given.names or NAMES}
    load, outcomes = os.getloadavg()[0], {}
    for name, module in modules.items():
        print(f"{name} ...", flush=True)
        outcomes[name] = run(name, options)
        print(f"{table(outcomes[name].spreads, module.GOALS)}\n", flush=True)
    if not given.quick and not given.names:
        _PAGE.write_text(page(outcomes, modules, str(given.repeats or 5), load))
        print(f"written: {_PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
