"""Teacher pools: how many teachers there are, which come and go, and what they borrow. Pure functions.

A pool grows by one teacher at a time into idle room, and gives it back as soon as the scheduler takes it. How many
teachers are useful is decided in `edl.master.scaling`; `edl.master.kube.capacity` counts idle room.
"""

from edl.master.kube.pools.planner import plan_pool

__all__ = ["plan_pool"]
