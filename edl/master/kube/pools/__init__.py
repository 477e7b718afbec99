"""Teacher pools: how many teachers there are, which to add and remove, and what they borrow. Pure functions."""

from edl.master.kube.pools.planner import plan_pool

__all__ = ["plan_pool"]
