"""`ElasticJob`: students, or any training under `edl run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from edl.kube.resource_types import ELASTIC_JOBS, ResourceType
from edl.master.kube.resources.fields import FieldReader, SpecProblem
from edl.master.kube.resources.member_owner import MemberOwner, check_template, read_owner

__all__ = ["ElasticJob", "MasterSpec", "parse_elastic_job"]

_UID_CHARS: Final = 8
"""Characters of a UID in a job's id: 16**8 values, enough to tell jobs of one name apart that follow one another."""


@dataclass(frozen=True)
class MasterSpec:
    """The job's master, a pod of its own.

    Attributes:
        enabled: there is one.
        args: what follows `edl master JOB` in its command line.
    """

    enabled: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ElasticJob(MemberOwner):
    """A training job of 1 to many workers.

    Attributes:
        run: what follows `edl run` in a worker's command line: options, the script, and its own arguments.
        checkpoint: URL where the job's state is stored; empty for none.
        active_deadline_s: seconds after its start when it fails; None for never.
        ttl_seconds_after_finished: seconds after its end when it is deleted; None for never.
        master: the job's master.
    """

    resource_type: ClassVar[ResourceType] = ELASTIC_JOBS

    run: tuple[str, ...]
    checkpoint: str = ""
    active_deadline_s: int | None = None
    ttl_seconds_after_finished: int | None = None
    master: MasterSpec = field(default_factory=MasterSpec)

    @property
    def job_id(self) -> str:
        """What `edl status` and the store call the job: two jobs of one name that follow one another are not one."""
        return f"{self.name}-{self.uid[:_UID_CHARS]}"


def parse_elastic_job(resource: Mapping[str, Any], default_store: str = "") -> ElasticJob | tuple[SpecProblem, ...]:
    """Read an `ElasticJob`.

    Args:
        resource: as the API server has it.
        default_store: URL of discovery where the resource names none.

    Returns:
        The job; or, if it cannot be worked on, why not, first what to mend first.
    """
    spec = FieldReader(resource.get("spec"), "spec")
    common = read_owner(resource, spec, default_store=default_store, default_min=1, default_grace_period_s=30)
    run = spec.read_texts("run")
    if not run:
        spec.refuse("EmptyRun", "run", list(run), 'write what follows `edl run`, such as ["train.py", "--lr", "0.1"]')
    if common["min_replicas"] < 1:
        spec.refuse("InvalidField", "minReplicas", common["min_replicas"], "a job needs 1 worker or more")
    if not common["store"]:
        spec.refuse("NoStore", "store", None, "name the job's store, or start the operator with --store")
    master = spec.open_object("master")
    check_template(spec, "run")
    job = ElasticJob(
        **common,
        run=run,
        checkpoint=spec.read_text("checkpoint"),
        active_deadline_s=spec.read_optional_count("activeDeadlineSeconds", 1),
        ttl_seconds_after_finished=spec.read_optional_count("ttlSecondsAfterFinished"),
        master=MasterSpec(master.read_flag("enabled"), master.read_texts("args")),
    )
    return tuple(spec.problems) or job
