"""Runs the tests: first those that may run side by side, then the others one after another.

    python -m tests                      everything
    python -m tests -k reader -x         a part; arguments are pytest's
    python -m tests --workers 4          so many side by side
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
QUICK = "not serial and not consul and not etcd"


def main() -> int:
    """Run both parts, the second one also where the first failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__, add_help=False)
    # Many tests wait for processes that they started, so one more than there are cores keeps these busy.
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) + 1)
    parser.add_argument("--quick", action="store_true")
    options, arguments = parser.parse_known_args()
    beside = ["-n", str(options.workers), "--dist", "loadfile"]
    parts = {
        "side by side": ["-m", "not serial", *beside],
        "one after another": ["-m", "serial"],
    }
    if options.quick:
        parts = {"quickly": ["-m", QUICK, *beside, "tests/unit", "tests/conformance"]}
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
