"""Member pods of ElasticJobs and TeacherPools: named, built and read, and their ends recorded, for every role alike.

Workers, teachers and masters are members. Planners decide with `MemberPod`s; facts that must outlive a pod are in the
owner's `status.members`. How many members there should be is decided in `edl.master.kube.jobs` and `.pools`.
"""

__all__: list[str] = []
