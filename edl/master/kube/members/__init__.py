"""Member pods of ElasticJobs and TeacherPools: read, named, built, and their ends recorded; the same for every role.

Workers, teachers and masters are members alike. What a planner decides with is a `MemberPod`; what must outlive a pod
is in the owner's `status.members`. Elsewhere: how many members there should be
(`edl.master.kube.jobs`, `edl.master.kube.pools`), and calls of the API.
"""

__all__: list[str] = []
