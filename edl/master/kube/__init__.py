"""The Kubernetes operator: runs as many members (pods) of each `ElasticJob` and `TeacherPool` as are wanted.

A work queue calls `reconcile(key)`, which reads a resource and its pods live, has a pure planner decide, and carries
the plan out. Events of the API server only say when to reconcile. The only memory is the resources' status, so an
operator may be killed anywhere, and a second one does no harm.

Elsewhere: the Kubernetes client (`edl.kube`), how many workers and teachers are useful (`edl.master.scaling`), and the
programs in the pods (`edl run`, `edl serve`).
"""

__all__: list[str] = []
