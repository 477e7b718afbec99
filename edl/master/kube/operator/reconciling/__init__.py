"""A look at a resource: read it and its pods live, have its planner decide, carry the plan out.

What does not belong here: when to look (`queue`, `resource_watches`), and what stores and other jobs say
(`live_surroundings`).
"""

from edl.master.kube.operator.reconciling.reconciler import Reconciler, ResourceHandling

__all__ = ["Reconciler", "ResourceHandling"]
