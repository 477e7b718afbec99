"""What is idle in a cluster: nodes and pods as JSON -> `ClusterCapacity`, which says how many of a pod would fit.

`watch` alone asks the API server (list and watch of nodes and pods, which the optional ClusterRole `edl-capacity`
allows); all else is pure. What does not belong here: who gets what is idle (`edl.master.scaling.arbitration`), and what
is done about it (`edl.master.kube.jobs`, `edl.master.kube.pools`).
"""

from edl.master.kube.capacity.cluster import ClusterCapacity
from edl.master.kube.capacity.nodes import NodeCapacity
from edl.master.kube.capacity.pods import PodClaim

__all__ = ["ClusterCapacity", "NodeCapacity", "PodClaim"]
