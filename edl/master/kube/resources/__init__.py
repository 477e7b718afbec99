"""`ElasticJob` and `TeacherPool` as frozen dataclasses, read from what the API server has, with reasons why not.

What does not belong here: pods, decisions, and calls of the API.
"""

from edl.master.kube.resources.elastic_job import ElasticJob, MasterSpec, parse_elastic_job
from edl.master.kube.resources.fields import SpecProblem
from edl.master.kube.resources.member_owner import MemberOwner
from edl.master.kube.resources.teacher_pool import ScaleTargetRef, TeacherPool, parse_teacher_pool

__all__ = [
    "ElasticJob",
    "MasterSpec",
    "MemberOwner",
    "ScaleTargetRef",
    "SpecProblem",
    "TeacherPool",
    "parse_elastic_job",
    "parse_teacher_pool",
]
