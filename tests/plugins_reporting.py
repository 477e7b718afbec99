"""A pytest plugin: the order of files, and what a run says at its end.

The end of a run shows what was skipped and why, and which tests were retried after which failure. In CI (`CI=true`),
which has every component, a skipped test fails the run; more than `MAX_RETRIED` retried tests fail it everywhere.
"""

from __future__ import annotations

import json
import os
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


def read_durations() -> dict[str, float]:
    """Return seconds by file; none if the file is missing or cut, since they only decide an order."""
    try:
        return dict(json.loads(DURATIONS.read_text()))
    except (OSError, ValueError):
        return {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-file", type=Path, help="write what each file took to this file, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the longest files start first, so that no process waits for a last one at the end."""
    durations = read_durations()
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
    # Where tests ended pytest with a code of their own, or where there is nothing but skipped tests, as well.
    wrong = skipped_in_ci or len(_retried(stats)) > MAX_RETRIED or stats.get("failed") or stats.get("error")
    if wrong and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (file := session.config.getoption("--report-file")) is not None:
        seconds: dict[str, float] = defaultdict(float)
        for report in (report for reports in stats.values() for report in reports):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
        found = {"seconds": seconds, "retried": list(_retried(stats)), "skipped": _skipped(stats)}
        file.write_text(json.dumps(found))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    if skipped := _skipped(stats):
        in_ci = os.environ.get("CI") == "true"
        terminalreporter.section("skipped" + ", which fails this run: CI skips nothing" * in_ci, red=in_ci)
        for line in skipped:
            terminalreporter.line(line)
    if retried := _retried(stats):
        too_many = len(retried) > MAX_RETRIED
        terminalreporter.section(f"retried{', which are too many and fail this run' * too_many}", red=too_many)
        for nodeid, report in retried.items():
            terminalreporter.line(f"{nodeid}: failed first in {report.when}:")
            terminalreporter.line(report.longreprtext)


def _skipped(stats: dict[str, list[Any]]) -> list[str]:
    """Return a line for each reason, the most frequent first: how many tests, why, and where."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for report in stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[" ".join(reason.removeprefix("Skipped: ").split())].append(report.nodeid.partition("::")[0])
    lines = []
    for reason, files in sorted(reasons.items(), key=lambda entry: -len(entry[1])):
        places = ", ".join(sorted(set(files))[:3]) + ", ..." * (len(set(files)) > 3)
        lines.append(f"{len(files):5}  {reason} ({places})")
    return lines


def _retried(stats: dict[str, list[Any]]) -> dict[str, pytest.TestReport]:
    """Return the first failure of each test that was run again."""
    first: dict[str, pytest.TestReport] = {}
    for report in stats.get("rerun", []):
        first.setdefault(report.nodeid, report)
    return first
