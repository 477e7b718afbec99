"""Names, builds and reads member pods of ElasticJobs and TeacherPools in every role, and records their ends.

Workers, teachers and masters are members. Planners decide with `MemberPod`s; facts that must outlive a pod are in the
owner's `status.members`. `edl.master.kube.jobs` and `.pools` decide how many members there should be.
"""

__all__: list[str] = []
