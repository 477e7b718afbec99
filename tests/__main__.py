"""Runs the tests: side by side, jobs of several processes two at a time, those before vLLM, Kubernetes, the rest alone.

    python -m tests                      everything
    python -m tests -k reader -x         a part; arguments are pytest's
    python -m tests --workers 4          so many side by side
    python -m tests --without-kubernetes all but the tests that need a cluster
    python -m tests --quick              unit tests, and the conformance of stores that need no server: `make check`

`python -m pytest` runs them too, all one after another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED
INTERRUPTED = 2
APART = "not kubernetes and not vllm"
QUICK = "not serial and not kubernetes and not vllm and not consul and not etcd and not chromium and not prometheus"


def main() -> int:
    """Run all parts, the later ones also where one before failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__, add_help=False)
    # Most tests wait for processes that they started: twice as many as there are cores keep these busy.
    parser.add_argument("--workers", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=2, help="jobs of several processes at a time")
    parser.add_argument("--without-kubernetes", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options, arguments = parser.parse_known_args()
    order = ["--dist", "loadfile", "--no-loadscope-reorder"]  # as collected: see LONG in tests/conftest.py
    beside = ["-n", str(options.workers), *order]
    parts = {
        "side by side": ["-m", f"not serial and {APART}", *beside],
        "two at a time": ["-m", f"serial and not alone and {APART}", "-n", str(options.jobs), *order],
        # In one process, and so with one server, which takes a minute to start and all of a core.
        "before a vLLM": ["-m", "vllm"],
        # One cluster, and jobs whose pods share the cores.
        "on Kubernetes": ["-m", "kubernetes and not alone", "-n", str(options.jobs), *order],
        "one after another": ["-m", "alone"],
    }
    if options.without_kubernetes:
        del parts["on Kubernetes"]
        parts["one after another"] = ["-m", "alone and not kubernetes"]
    if options.quick:
        parts = {"quickly": ["-m", QUICK, *beside, "tests/fast"]}
    codes = []
    for name, selection in parts.items():
        print(f"Tests that run {name}:", flush=True)
        begin = time.monotonic()
        codes.append(_pytest([*selection, *arguments]))
        print(f"Tests that run {name}: {time.monotonic() - begin:.0f} s, exit code {codes[-1]}\n", flush=True)
        if codes[-1] == INTERRUPTED or (codes[-1] not in (0, NO_TESTS) and _stops_at_failure(arguments)):
            break
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return max(code for code in codes if code != NO_TESTS)


def _pytest(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugins_house", *arguments]
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def _stops_at_failure(arguments: list[str]) -> bool:
    return any(argument in ("-x", "--exitfirst") or argument.startswith("--maxfail") for argument in arguments)


if __name__ == "__main__":
    sys.exit(main())
