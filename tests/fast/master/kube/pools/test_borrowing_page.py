"""The resources in docs/kubernetes-borrowing.md are what the operator takes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from edl.master.kube.observation import OwnerObservation
from edl.master.kube.pools import plan_pool
from edl.master.kube.resources import TeacherPool, parse_teacher_pool

PAGE = Path(__file__).parents[5] / "docs/kubernetes-borrowing.md"


def test_pools_of_the_page() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        resource = yaml.safe_load(block)
        resource["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
        pool = parse_teacher_pool(resource, "sqlite:///store")
        assert isinstance(pool, TeacherPool), pool
        plan = plan_pool(pool, OwnerObservation(1e9, wanted=3, target_replicas=2))
        assert (len(plan.create), plan.scale_target) == ((0, 3) if pool.scale_target_ref else (1, None))


def test_reasons_of_the_page_are_the_codes() -> None:
    """Each reason of `Growing` is in the page's table, and no other."""
    rows = re.findall(r"^\| (?:True|False) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    folder = Path(__file__).parents[5] / "edl/master/kube/pools"
    code = "".join((folder / name).read_text() for name in ("growth.py", "scale_target.py"))
    used = set(re.findall(r'Growth\((?:True|False), "(\w+)"', code))
    assert named == used
