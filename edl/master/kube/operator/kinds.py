"""The kinds of resources that the operator works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edl.kube.resource_types import ELASTIC_JOBS, TEACHER_POOLS
from edl.master.kube.jobs import plan_job
from edl.master.kube.operator.reconciling.reconciler import ResourceHandling
from edl.master.kube.pools import plan_pool
from edl.master.kube.resources import parse_elastic_job, parse_teacher_pool

__all__ = ["KINDS"]

KINDS: Final[Mapping[str, ResourceHandling]] = {
    ELASTIC_JOBS.plural: ResourceHandling(ELASTIC_JOBS, parse_elastic_job, plan_job),
    TEACHER_POOLS.plural: ResourceHandling(TEACHER_POOLS, parse_teacher_pool, plan_pool),
}
