"""The Kubernetes operator: runs as many members (pods) of each `ElasticJob` and `TeacherPool` as are wanted.

A work queue calls `reconcile(key)`, which reads a resource and its pods from the API server, lets a pure planner
decide, and carries out the plan. API events only determine when to reconcile.
"""

__all__: list[str] = []
