"""A pytest plugin: the order of files, and what a run says at its end.

The end of a run shows what was skipped and why, which tests were retried after which failure, and the command that
runs a failed test alone. In CI (`CI=true`), which has every component, a skipped test fails the run; more than
`MAX_RETRIED` retried tests fail it everywhere.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of each file of tests that takes a second or more, as `make test-all` measured them."""
LONG_S = 5.0
"""Files of the fast tier that take longer start first; the order of all others is random."""
MAX_RETRIED = 3
"""A retried test is a fault of the test or the product that waits to be found. More of them hide a broken tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-file", type=Path, help="write what each file took to this file, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the longest files start first, so that no process waits for a last one at the end."""
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    shortest = LONG_S if config.pluginmanager.has_plugin("randomly") else 0.0

    def seconds(item: pytest.Item) -> float:
        found = durations.get(item.nodeid.partition("::")[0], 0.0)
        return found if found > shortest else 0.0

    items.sort(key=lambda item: -seconds(item))  # stable: a file's tests stay together


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    stats = reporter.stats
    skipped_in_ci = os.environ.get("CI") == "true" and stats.get("skipped")
    if skipped_in_ci or len(_retried(stats)) > MAX_RETRIED:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if (file := session.config.getoption("--report-file")) is not None:
        seconds: dict[str, float] = defaultdict(float)
        for report in (report for reports in stats.values() for report in reports):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
        file.write_text(json.dumps({"seconds": seconds}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    if skipped := stats.get("skipped", []):
        in_ci = os.environ.get("CI") == "true"
        terminalreporter.section("skipped" + ", which fails this run: CI skips nothing" * in_ci, red=in_ci)
        reasons: dict[str, list[str]] = defaultdict(list)
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reasons[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0])
        for reason, files in sorted(reasons.items(), key=lambda entry: -len(entry[1])):
            places = ", ".join(sorted(set(files))[:3]) + ", ..." * (len(set(files)) > 3)
            terminalreporter.line(f"{len(files):5}  {reason} ({places})")
    if retried := _retried(stats):
        too_many = len(retried) > MAX_RETRIED
        terminalreporter.section(f"retried{', which are too many and fail this run' * too_many}", red=too_many)
        for nodeid, report in retried.items():
            terminalreporter.line(f"{nodeid}: failed first in {report.when}:")
            terminalreporter.line(report.longreprtext)
    if failed := [*stats.get("failed", []), *stats.get("error", [])]:
        terminalreporter.section("to run a failed test alone")
        seed = getattr(config.option, "randomly_seed", None)
        for nodeid in dict.fromkeys(report.nodeid for report in failed):
            if config.pluginmanager.has_plugin("randomly") and isinstance(seed, int):
                nodeid_and_seed = f"{shlex.quote(nodeid)} -p randomly --randomly-seed={seed}"
            else:
                nodeid_and_seed = shlex.quote(nodeid)
            terminalreporter.line(f"{os.path.relpath(sys.executable)} -m pytest {nodeid_and_seed}")


def _retried(stats: dict[str, list[Any]]) -> dict[str, pytest.TestReport]:
    """Return the first failure of each test that was run again."""
    first: dict[str, pytest.TestReport] = {}
    for report in stats.get("rerun", []):
        first.setdefault(report.nodeid, report)
    return first
