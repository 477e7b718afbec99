"""Teacher pools: how many teachers there are, which to add and remove, and what they borrow. Pure functions.

A pool grows by one teacher at a time into idle room, and returns it as soon as the scheduler needs it.
`edl.master.scaling` decides how many teachers are useful; `edl.master.kube.capacity` counts idle room.
"""

from edl.master.kube.pools.planner import plan_pool

__all__ = ["plan_pool"]
