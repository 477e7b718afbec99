"""`ClusterCapacity`: what all nodes have, what pods hold of it, and what those that wait will take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from edl.master.kube.capacity.amounts import ONE, Amounts, add_amounts
from edl.master.kube.capacity.nodes import NodeCapacity
from edl.master.kube.capacity.pods import PodClaim, refuse_shapes

__all__ = ["GPU", "ClusterCapacity"]

GPU: Final = "nvidia.com/gpu"
"""The extended resource of NVIDIA's device plugin: https://github.com/NVIDIA/k8s-device-plugin."""


class ClusterCapacity:
    """A cluster's nodes and pods at a moment. Nothing of it changes.

    What is free on a node is its allocatable amount, less what pods ask for that are on it and have not ended (one that
    is being deleted holds on until it is gone), less what pods ask for that the scheduler has nominated for the node.
    Pods that wait otherwise come first as well, by priority and age: each takes the first node with room that it may
    run on. What fits nowhere takes nothing, as it would wait whatever else was started.

    Not modelled, so that a pod for which there is room here may wait nevertheless: affinity and spreading among pods,
    ports of the host, volumes that are bound to nodes, devices claimed by DRA, quotas of a namespace, and resources
    that are resized in place. Nor that a pod of higher priority could take another's place.

    Args:
        nodes: all of the cluster.
        pods: all of the cluster.
    """

    def __init__(self, nodes: Iterable[NodeCapacity], pods: Iterable[PodClaim]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._pods = {pod.uid: pod for pod in pods}
        self._held: dict[str, dict[str, int]] = {name: {} for name in self._nodes}
        self._nominated: list[PodClaim] = []
        self._waiting: list[PodClaim] = []
        for pod in self._pods.values():
            if pod.node and not pod.ended:
                add_amounts(self._held.setdefault(pod.node, {}), pod.requests)
            elif pod.waits:
                (self._nominated if pod.nominated_node in self._nodes else self._waiting).append(pod)
        self._waiting.sort(key=lambda pod: (-(pod.priority or 0), pod.created, pod.namespace, pod.name))

    @classmethod
    def of(cls, nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> ClusterCapacity:
        """Read nodes and pods.

        Raises:
            ValueError: a quantity is none of Kubernetes'.
        """
        return cls([NodeCapacity.of(node) for node in nodes], [PodClaim.of(pod) for pod in pods])

    @property
    def pods(self) -> Collection[PodClaim]:
        """All pods of the cluster."""
        return self._pods.values()

    def without(self, uid: str) -> ClusterCapacity:
        """Return the same cluster without a pod."""
        return ClusterCapacity(self._nodes.values(), [pod for pod in self._pods.values() if pod.uid != uid])

    def shows(self, uid: str, node: str) -> bool:
        """Return whether a pod is known here, and to be on a node: else what is seen here is older than the pod."""
        pod = self._pods.get(uid)
        return pod is not None and (not node or pod.node == node)

    def count_fitting(self, pod: Mapping[str, Any] | PodClaim, *, ignored: Collection[str] = ()) -> int:
        """Return how many pods like this could start now, with what nobody holds and nobody before them waits for.

        Pods that wait come first, but for those whose uids are `ignored`, such as the asking pool's own.

        Raises:
            ValueError: a quantity is none of Kubernetes', or a field is not what the API has there.
        """
        claim = pod if isinstance(pod, PodClaim) else PodClaim.of(pod)
        free = self._free(lambda other: other.uid not in ignored and _comes_first(other, claim))
        with refuse_shapes():
            return sum(_count_of(claim.requests, free[node.name]) for node in self._usable(claim))

    def count_possible(self, pod: Mapping[str, Any] | PodClaim) -> int:
        """Return how many pods like this could start if no other pod were there.

        Raises:
            ValueError: a quantity is none of Kubernetes', or a field is not what the API has there.
        """
        claim = pod if isinstance(pod, PodClaim) else PodClaim.of(pod)
        with refuse_shapes():
            return sum(_count_of(claim.requests, node.allocatable) for node in self._usable(claim))

    def list_devices(self, is_lent: Callable[[PodClaim], bool], resource: str = GPU) -> dict[str, int]:
        """Return how many devices of each usable node are there for jobs to share.

        Those that are idle count, and those that lent pods hold: workers among which an arbiter shares, and teachers,
        which give back what they borrowed. Devices for which a pod waits that is not lent do not.
        """
        held: dict[str, dict[str, int]] = {name: {} for name in self._nodes}
        for pod in self._pods.values():
            if pod.node in held and not pod.ended and not is_lent(pod):
                add_amounts(held[pod.node], pod.requests)
        free = self._free(lambda pod: not is_lent(pod), held)
        return {
            node.name: max(0, free[node.name].get(resource, 0) // ONE)
            for node in self._nodes.values()
            if node.usable and resource in node.allocatable
        }

    def count_workers(self, is_counted: Callable[[PodClaim], bool]) -> dict[str, int]:
        """Return how many pods of a kind are on each node, and have not ended."""
        counts: dict[str, int] = {}
        for pod in self._pods.values():
            if pod.node and not pod.ended and is_counted(pod):
                counts[pod.node] = counts.get(pod.node, 0) + 1
        return counts

    def _usable(self, claim: PodClaim) -> list[NodeCapacity]:
        return [
            node
            for node in self._nodes.values()
            if node.usable and claim.rules.allow(node.name, node.labels, node.taints)
        ]

    def _free(
        self, comes_first: Callable[[PodClaim], bool], held: Mapping[str, Amounts] | None = None
    ) -> dict[str, dict[str, int]]:
        """Return what is left of each node when pods that wait and come first have taken theirs."""
        held = self._held if held is None else held
        free = {name: dict(node.allocatable) for name, node in self._nodes.items()}
        for name in free:
            add_amounts(free[name], held.get(name, {}), -1)
        for pod in self._nominated:
            if comes_first(pod):
                add_amounts(free[pod.nominated_node], pod.requests, -1)
        hopeless: set[str] = set()  # of many pods alike, as those of a job, the first that fits nowhere speaks for all
        for pod in self._waiting:
            if pod.shape in hopeless or not comes_first(pod):
                continue
            for node in self._usable(pod):
                if _count_of(pod.requests, free[node.name]):
                    add_amounts(free[node.name], pod.requests, -1)
                    break
            else:
                hopeless.add(pod.shape)
        return free


def _comes_first(pod: PodClaim, claim: PodClaim) -> bool:
    """Return whether a waiting pod is served before the claim, which waits from now on: all but those below it."""
    return pod.priority is None or claim.priority is None or pod.priority >= claim.priority


def _count_of(requests: Amounts, free: Amounts) -> int:
    """Return how many pods with these requests there is room for."""
    return max(0, min((free.get(name, 0) // amount for name, amount in requests.items()), default=0))
