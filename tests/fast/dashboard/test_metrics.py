"""What is not known, or was decided by nobody that lives, is no figure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.collective.goodput.node import NodeRecord, ProgressMark
from edl.collective.goodput.records import JobRecord
from edl.collective.goodput.summary import as_dict, summarize
from edl.dashboard.metrics import DashboardMetrics, ServerFigures
from edl.dashboard.state.jobs import job_status
from edl.dashboard.state.schema import DashboardState, JobStatus, ServiceStatus, WantedCount

NOW = 1_000_000.0


def _exported(*jobs: JobStatus, wanted: WantedCount | None = None) -> dict[str, float]:
    state = DashboardState(NOW, "", "", jobs=jobs, services=(ServiceStatus("s", (), (), wanted),))
    metrics = DashboardMetrics(lambda: state, lambda: ServerFigures(1, 0.1, 0))
    return {sample.name: sample.value for family in metrics.collect() for sample in family.samples}


@pytest.mark.parametrize("age_s", [5.0, 61.0])
def test_old_wanted_count_is_left_out(age_s: float) -> None:
    wanted = WantedCount(4, 2, "", NOW - 900, NOW - age_s)
    job = job_status("j", None, None, wanted, 5)
    exported = _exported(job, wanted=wanted)
    for count, age in (
        ("edl_pool_wanted_replicas", "edl_pool_wanted_age_seconds"),
        ("edl_job_wanted_workers", "edl_job_wanted_age_seconds"),
    ):
        assert exported.get(count) == (4 if age_s < 60 else None)
        assert exported[age] == age_s
    ended = _exported(dataclasses.replace(job, state="done"))
    assert "edl_job_wanted_workers" not in ended
    assert "edl_job_wanted_age_seconds" not in ended


@pytest.mark.parametrize("samples", [0, 640])
def test_unknown_samples_are_no_zero(samples: int) -> None:
    """A job that is killed does 0 samples a second; one that never told of any does an unknown number."""
    node = NodeRecord("a", 0, 1, marks=(ProgressMark(1, 9, samples),), step=9)
    summary = summarize(JobRecord("j", None, (node,), ()), 1_000_000_000)
    fields: dict[str, Any] = as_dict(summary, 5)
    expected = 0.0 if samples else None
    assert (fields["samples_per_s"], fields["nodes"][0]["samples_per_s"]) == (expected, expected)
    exported = _exported(job_status("j", summary, None, None, 5))
    assert exported.get("edl_job_samples_per_second") == expected
    assert exported["edl_job_steps_per_second"] == 0
