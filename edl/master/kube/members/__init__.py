"""Member pods of ElasticJobs and TeacherPools: read, named, built, and their ends recorded; the same for every role.

Workers, teachers and masters are members alike. What a planner decides with is a `MemberPod`; what must outlive a pod
stands in the owner's `status.members`. What does not belong here: how many members there should be
(`edl.master.kube.jobs`, `edl.master.kube.pools`), and calls of the API.
"""

from edl.master.kube.members.naming import build_member_name, build_owner_reference, build_selector
from edl.master.kube.members.pod_template import MemberLaunch, build_member_pod
from edl.master.kube.members.pods import MemberPod, read_member_pod, read_member_pods
from edl.master.kube.members.records import (
    MemberEnd,
    MemberOutcome,
    MemberRecord,
    find_end,
    format_member_records,
    read_member_records,
    record_end,
    relax_exclusions,
)

__all__ = [
    "MemberEnd",
    "MemberLaunch",
    "MemberOutcome",
    "MemberPod",
    "MemberRecord",
    "build_member_name",
    "build_member_pod",
    "build_owner_reference",
    "build_selector",
    "find_end",
    "format_member_records",
    "read_member_pod",
    "read_member_pods",
    "read_member_records",
    "record_end",
    "relax_exclusions",
]
