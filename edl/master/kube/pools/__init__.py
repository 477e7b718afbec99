"""Teacher pools: how many teachers there are, which come and go, and what they borrow. Pure functions.

A pool grows by one teacher at a time into what is idle, and gives back what it borrowed as soon as the scheduler takes
it. Elsewhere: how many teachers are useful (`edl.master.scaling`), what is idle
(`edl.master.kube.capacity`), and calls of the API (`edl.master.kube.operator`).
"""

from edl.master.kube.pools.planner import plan_pool

__all__ = ["plan_pool"]
