"""The pages on conditions and on borrowing say what the operator does: each reason, each limit, each resource."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from edl.kube.resource_types import DEPLOYMENTS
from edl.master.kube.jobs.status import FAILURE_ADVICE, FAILURE_REASONS
from edl.master.kube.observation import OwnerObservation, ScaleTarget, StoreAnswer
from edl.master.kube.pools import plan_pool
from edl.master.kube.resources import TeacherPool, parse_teacher_pool
from edl.master.scaling.terminations import RELAUNCH_TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/kubernetes-conditions.md").read_text()
BORROWING = (ROOT / "docs/kubernetes-borrowing.md").read_text()
KUBE = ROOT / "edl/master/kube"


def test_page_has_what_jobs_fail_for() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*)\. \|$", PAGE.split("### Failed\n")[1].split("\n#")[0], re.MULTILINE)
    advice = {reason: text[0].lower() + text[1:] for reason, text in rows}
    assert {reason: text[0].lower() + text[1:] for reason, text in FAILURE_ADVICE.items()} == advice
    assert set(FAILURE_ADVICE) == {*FAILURE_REASONS.values(), "DeadlineExceeded"}


def test_page_has_the_relaunch_table() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    limits = {}
    for cause, rules in RELAUNCH_TABLE.items():
        endless = any(rule.times is None for rule in rules)
        limits[cause.value] = "no limit" if endless else str(sum(rule.times or 0 for rule in rules))
        assert endless == (cause not in FAILURE_REASONS)
    assert dict(rows) == {**limits, "succeeded": "-"}


def test_page_has_the_operators_reasons() -> None:
    """Of what the operator writes itself, each stands somewhere on the page."""
    code = "".join(path.read_text() for path in KUBE.rglob("*.py"))
    found = set(re.findall(r'Growth\((?:True|False), "(\w+)"', code))
    growing = {reason for row in re.findall(r"^\| (?:True|False) \| (.*?) \|", BORROWING, re.MULTILINE)
               for reason in re.findall(r"`(\w+)`", row)}  # fmt: skip
    assert growing == found
    found |= set(re.findall(r'EventNote\(\s*"\w+", "(\w+)"', code))
    found |= set(re.findall(r'Condition\("\w+", [\w.]+, "(\w+)"', code))
    found |= set(re.findall(r'(?:build|note)\((?:[\w()]+, )?"(\w+)"', code))
    found |= set(re.findall(r'refuse\(\s*"(\w+)"', code))
    assert len(found) > 20
    assert {reason for reason in found if f"`{reason}`" not in PAGE} == set()


def test_pools_of_the_page() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", BORROWING, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        resource = yaml.safe_load(block)
        resource["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
        pool = parse_teacher_pool(resource, "sqlite:///store")
        assert isinstance(pool, TeacherPool), pool
        target = ScaleTarget(DEPLOYMENTS, "triton", 2, 2)
        plan = plan_pool(pool, OwnerObservation(1e9, store=StoreAnswer(3), target=target))
        assert (len(plan.create), plan.scale and plan.scale[1]) == ((0, 3) if pool.scale_target_ref else (1, None))
