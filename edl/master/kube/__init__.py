"""The operator of a Kubernetes cluster: members (pods) of `ElasticJob` and `TeacherPool`, as many as are wanted.

A work queue calls `reconcile(key)`, which reads a resource and its pods live, has a pure planner decide, and carries
the plan out. Events of the API server only say when to look. Only the resources' status is remembered,
so an operator that is killed anywhere, or a second one, is just another observation.

Elsewhere: calls of the Kubernetes API (`edl.kube`), how many workers and teachers are useful
(`edl.master.scaling`), and what runs in the pods (`edl run`, `edl serve`).
"""

__all__: list[str] = []
