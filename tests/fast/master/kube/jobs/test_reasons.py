"""Reasons of conditions and events: CamelCase, complete, and in the page as in the code."""

from __future__ import annotations

import re
from pathlib import Path

from edl.master.kube.jobs import CONDITION_REASONS, EVENT_REASONS
from edl.master.kube.jobs.reasons import FAILURE_ADVICE, FAILURE_REASONS
from edl.master.kube.members.relaunching import POD_RELAUNCH_TABLE

ROOT = Path(__file__).resolve().parents[5]
PAGE = (ROOT / "docs/kubernetes-conditions.md").read_text()
KUBE = ROOT / "edl/master/kube"


def read_section(title: str) -> dict[str, str]:
    """Return reason -> meaning of the table below a title."""
    section = PAGE.split(f" {title}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def test_page_has_the_tables() -> None:
    for kind, reasons in CONDITION_REASONS.items():
        assert read_section(kind) == reasons, f"docs/kubernetes-conditions.md, {kind}"
    assert read_section("Events of a job") == EVENT_REASONS


def test_page_has_the_relaunch_table() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    limits = {}
    for cause, rules in POD_RELAUNCH_TABLE.items():
        times = [rule.times or 0 for rule in rules]
        endless = any(rule.times is None for rule in rules)
        limits[cause.value] = "without end" if endless else str(sum(times))
    assert dict(rows) == {**limits, "succeeded": "-"}


def test_page_has_the_operators_reasons() -> None:
    """Of what pools and the operator write themselves, each stands somewhere on the page."""
    found = set()
    for folder in ("pools", "operator", "resources"):
        for path in (KUBE / folder).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'Growth\((?:True|False), "(\w+)"', text))
            found |= set(re.findall(r'EventNote\(\s*"\w+", "(\w+)"', text))
            found |= set(re.findall(r'Condition\("\w+", [\w.]+, "(\w+)"', text))
            found |= set(re.findall(r'refuse\(\s*"(\w+)"', text))
    assert len(found) > 20
    assert {reason for reason in found if f"`{reason}`" not in PAGE} == set()


def test_failures_are_told_apart() -> None:
    failed = set(CONDITION_REASONS["Failed"]) - {"NotFailed"}
    assert failed == set(FAILURE_ADVICE) == {*FAILURE_REASONS.values(), "DeadlineExceeded"}
    endless = {cause for cause, rules in POD_RELAUNCH_TABLE.items() if any(rule.times is None for rule in rules)}
    assert {cause for cause in POD_RELAUNCH_TABLE if cause not in FAILURE_REASONS} == endless


def test_reasons_are_camel_case() -> None:
    reasons = {*EVENT_REASONS, *(reason for kind in CONDITION_REASONS.values() for reason in kind)}
    assert all(re.fullmatch(r"([A-Z][a-z]+)+", reason) for reason in reasons)
