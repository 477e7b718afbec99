"""`ElasticJob`: students, or any training under `edl run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from edl.kube.resource_types import ELASTIC_JOBS, ResourceType
from edl.master.kube.resources.fields import FieldReader, SpecProblem
from edl.master.kube.resources.member_owner import MemberOwner, check_template, read_owner
from edl.quoting import shown

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
        ignored_edits: what the spec says otherwise than the run that goes on has it, and what to do; empty for nothing.
    """

    resource_type: ClassVar[ResourceType] = ELASTIC_JOBS

    run: tuple[str, ...]
    checkpoint: str = ""
    active_deadline_s: int | None = None
    ttl_seconds_after_finished: int | None = None
    master: MasterSpec = field(default_factory=MasterSpec)
    ignored_edits: str = ""

    @property
    def job_id(self) -> str:
        """What `edl status` and the store call the job: two jobs of one name that follow one another are not one."""
        return f"{self.name}-{self.uid[:_UID_CHARS]}"

    @property
    def started(self) -> bool:
        """Whether a run of it goes on, as its status says; none does while it is suspended."""
        return bool(self.status.get("startTime"))

    def pin_run(self) -> ElasticJob:
        """Return the job with the store and the checkpoint that its run began with, as its status has them.

        Workers that meet in another store would be a second world of the same job, and write to the same checkpoint.
        """
        store, checkpoint = self.status.get("store"), self.status.get("checkpoint")
        store = store if isinstance(store, str) and store else self.store
        checkpoint = checkpoint if isinstance(checkpoint, str) else self.checkpoint
        edits = []
        if self.store != store:
            edits.append(f"store {shown(self.store or 'none')} in place of {shown(store)}")
        if self.checkpoint != checkpoint:
            edits.append(f"checkpoint {shown(self.checkpoint or 'none')} in place of {shown(checkpoint or 'none')}")
        if not edits:
            return self
        text = f"not taken while pods of the job run: {', '.join(edits)}; suspend the job, and resume it without pods"
        return replace(self, store=store, checkpoint=checkpoint, ignored_edits=text)


def parse_elastic_job(resource: Mapping[str, Any], default_store: str = "") -> ElasticJob | tuple[SpecProblem, ...]:
    """Read an `ElasticJob`.

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
    if not common["store"] and not (common["status"].get("startTime") and common["status"].get("store")):
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
    return tuple(spec.problems) or (job.pin_run() if job.started else job)
