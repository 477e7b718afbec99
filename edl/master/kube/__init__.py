"""The Kubernetes operator: runs as many members (pods) of each `ElasticJob` and `TeacherPool` as are wanted.

A work queue calls `reconcile(key)`, which reads a resource and its pods live, has a pure planner decide, and carries
the plan out. API events only say when to reconcile.
"""

__all__: list[str] = []
