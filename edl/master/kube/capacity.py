"""Idle capacity of a cluster: `ClusterCapacity` counts how many equal pods would fit, from nodes and pods as JSON.

Amounts are whole thousandths, the smallest unit that Kubernetes schedules (a CPU's `1m`), so sums are exact. Without
the read-only ClusterRole `edl-capacity` (permission to list and watch nodes and pods), capacity is unknown. The watch
retries every few seconds, so it notices a role that is added later.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from edl.kube import resource_types
from edl.kube.client import KubeClient
from edl.kube.objects import Object, parse_quantity
from edl.kube.watch import KubeWatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

Amounts = Mapping[str, int]
"""Resource name -> thousandths."""

ONE: Final = 1000
PODS: Final = "pods"
"""A resource of which every pod takes one unit without requesting it."""


def parse_allocatable(quantities: Mapping[str, Any]) -> Amounts:
    """Return a node's amounts, rounded down; ValueError if a quantity is invalid."""
    return {name: math.floor(parse_quantity(value) * ONE) for name, value in quantities.items()}


def parse_requests(resources: Mapping[str, Any]) -> dict[str, int]:
    """Return a container's requests, rounded up (a lone limit counts as a request); ValueError if any is invalid."""
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: math.ceil(parse_quantity(value) * ONE) for name, value in asked.items()}


def add_amounts(total: dict[str, int], more: Amounts, sign: int = 1) -> None:
    """Add amounts to a total, in place."""
    for name, amount in more.items():
        total[name] = total.get(name, 0) + sign * amount


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Return the requests of a pod as the scheduler counts them; ValueError if a quantity is invalid.

    Containers run together with sidecars (init containers that are restarted forever). Before that, the other init
    containers run one at a time, beside the sidecars already started. So a pod needs the larger of these two amounts,
    which pod-level resources in `spec.resources` replace, plus the overhead of its runtime class:
    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers.
    """
    running: dict[str, int] = {}
    before: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = parse_requests(container.get("resources") or {})
        if container.get("restartPolicy") == "Always":
            add_amounts(running, requests)
            _raise_to(before, running)
        else:
            add_amounts(requests, running)
            _raise_to(before, requests)
    for container in spec.get("containers") or ():
        add_amounts(running, parse_requests(container.get("resources") or {}))
    _raise_to(running, before)
    running.update(parse_requests(spec.get("resources") or {}))
    add_amounts(running, parse_requests({"requests": spec.get("overhead") or {}}))
    running[PODS] = ONE
    return {name: amount for name, amount in running.items() if amount > 0}


def _raise_to(amounts: dict[str, int], other: Amounts) -> None:
    for name, amount in other.items():
        amounts[name] = max(amounts.get(name, 0), amount)


_REPELLING: Final = frozenset({"NoSchedule", "NoExecute"})
"""Effects that keep a pod away; `PreferNoSchedule` is only a preference."""


def _is_tolerated(taint: Mapping[str, Any], toleration: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator") == "Exists":
        return key in ("", taint.get("key"))
    return bool(key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or ""))


@dataclass(frozen=True)
class PlacementRules:
    """Where a pod may run, according to its spec. One of the `terms` of its required node affinity must match."""

    selector: Mapping[str, str]
    terms: tuple[Mapping[str, Any], ...] | None
    tolerations: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> PlacementRules:
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        return cls(
            selector=spec.get("nodeSelector") or {},
            terms=None if required is None else tuple(required.get("nodeSelectorTerms") or ()),
            tolerations=tuple(spec.get("tolerations") or ()),
        )

    def allow(self, name: str, labels: Mapping[str, str], taints: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a pod with these rules may run on a node."""
        if any(labels.get(key) != value for key, value in self.selector.items()):
            return False
        if self.terms is not None and not any(_is_met(term, name, labels) for term in self.terms):
            return False
        return all(any(_is_tolerated(taint, toleration) for toleration in self.tolerations) for taint in taints)


def _is_met(term: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    """Return whether all requirements of a term are met; an empty term matches no node."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(rule, labels) for rule in expressions) and all(
        _holds(rule, {"metadata.name": name}) for rule in fields
    )


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    check = _OPERATORS.get(rule.get("operator", ""))
    return check is not None and check(labels.get(rule.get("key", "")), rule.get("values") or [])


def _compare(value: str | None, values: list[str]) -> int | None:
    """Return the sign of a label's number minus the rule's number; None if either is not a number."""
    try:
        difference = int(value or "") - int(values[0])
    except (ValueError, IndexError):
        return None
    return (difference > 0) - (difference < 0)


_OPERATORS: Final[Mapping[str, Callable[[str | None, list[str]], bool]]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, values: _compare(value, values) == 1,
    "Lt": lambda value, values: _compare(value, values) == -1,
}
"""https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#operators"""


@dataclass(frozen=True)
class NodeCapacity:
    """A node; `usable` if new pods can start on it: it is ready, not cordoned, and not being deleted."""

    name: str
    allocatable: Amounts
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, Any], ...]
    usable: bool

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeCapacity:
        """Read a node; ValueError if a quantity is invalid."""
        metadata, spec, status = node.get("metadata") or {}, node.get("spec") or {}, node.get("status") or {}
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        return cls(
            name=metadata.get("name", ""),
            allocatable=parse_allocatable(status.get("allocatable") or {}),
            labels=metadata.get("labels") or {},
            taints=tuple(taint for taint in spec.get("taints") or () if taint.get("effect") in _REPELLING),
            usable=ready and not spec.get("unschedulable") and not metadata.get("deletionTimestamp"),
        )


_ENDED: Final = frozenset({"Succeeded", "Failed"})


@contextmanager
def refuse_shapes() -> Iterator[None]:
    """Raise a ValueError for a field of the wrong type: templates are read before the API server has checked them."""
    try:
        yield
    except (AttributeError, TypeError) as exc:
        raise ValueError(f"a field does not match the API: {exc}") from exc


@dataclass(frozen=True)
class PodClaim:
    """The resources that a pod holds or waits for.

    Attributes:
        nominated_node: node on which the scheduler makes room for the pod; empty for none.
        priority: None before admission sets it.
        created: time of creation in the API's format; strings that sort earlier are earlier times.
        ended: the pod's containers have ended for good, and it holds no resources.
        deleting: the pod was asked to end. If it has a node, it holds its resources until it is gone; otherwise it
            waits for nothing.
    """

    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str]
    requests: Amounts
    rules: PlacementRules
    node: str
    nominated_node: str
    priority: int | None
    created: str
    ended: bool
    deleting: bool
    gated: bool

    @classmethod
    @refuse_shapes()
    def of(cls, pod: Mapping[str, Any]) -> PodClaim:
        """Read a pod or a pod template; ValueError if a quantity or a field is invalid."""
        metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
        priority = spec.get("priority")
        if priority is not None and not isinstance(priority, int):
            raise TypeError(f"priority {priority!r} is not a whole number")
        return cls(
            uid=metadata.get("uid", ""),
            namespace=metadata.get("namespace", ""),
            name=metadata.get("name", ""),
            labels=metadata.get("labels") or {},
            requests=pod_requests(spec),
            rules=PlacementRules.of(spec),
            node=spec.get("nodeName") or "",
            nominated_node=status.get("nominatedNodeName") or "",
            priority=priority,
            created=metadata.get("creationTimestamp") or "",
            ended=status.get("phase") in _ENDED,
            deleting=bool(metadata.get("deletionTimestamp")),
            gated=bool(spec.get("schedulingGates")),
        )

    @property
    def waits(self) -> bool:
        """Whether the scheduler is looking for a node for the pod."""
        return not (self.node or self.ended or self.deleting or self.gated)

    @cached_property
    def shape(self) -> str:
        """The pod's requests and rules as a string; pods with equal strings fit on the same nodes."""
        return repr((sorted(self.requests.items()), self.rules))


GPU: Final = "nvidia.com/gpu"
"""The extended resource of NVIDIA's device plugin: https://github.com/NVIDIA/k8s-device-plugin."""


class ClusterCapacity:
    """A cluster's nodes and pods at one moment. Immutable.

    A node's free amount is its allocatable amount, minus the requests of pods on it that have not ended (even if they
    are being deleted) and of pods that the scheduler has nominated for it. Other waiting pods also take precedence, by
    priority and age. Each of them takes the first node with room; a pod that fits nowhere takes nothing.

    A pod that fits here may still have to wait, because the following are not modelled: affinity and spreading among
    pods, host ports, volumes bound to nodes, devices claimed by DRA, quotas, in-place resizing of resources, and
    preemption.
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
        """Read nodes and pods; ValueError if a quantity is invalid."""
        return cls([NodeCapacity.of(node) for node in nodes], [PodClaim.of(pod) for pod in pods])

    @property
    def pods(self) -> Collection[PodClaim]:
        return self._pods.values()

    def without(self, uids: Collection[str]) -> ClusterCapacity:
        return ClusterCapacity(self._nodes.values(), [pod for pod in self._pods.values() if pod.uid not in uids])

    def shows(self, uid: str, node: str) -> bool:
        """Whether this capacity includes the pod on that node; otherwise it is older than the pod's placement."""
        pod = self._pods.get(uid)
        return pod is not None and (not node or pod.node == node)

    def count_fitting(self, pod: Mapping[str, Any] | PodClaim, *, ignored: Collection[str] = ()) -> int | None:
        """Return how many such pods could start now, after the waiting pods that come first and are not `ignored`.

        None if the pod is malformed: the API server refuses it with its own message.
        """
        try:
            claim = pod if isinstance(pod, PodClaim) else PodClaim.of(pod)
            free = self._free(lambda other: other.uid not in ignored and _comes_first(other, claim))
            with refuse_shapes():
                return sum(_count_of(claim.requests, free[node.name]) for node in self._usable(claim))
        except ValueError:
            return None

    def list_gpus(self, is_lent: Callable[[PodClaim], bool], is_worker: Callable[[PodClaim], bool]) -> dict[str, int]:
        """Return, by node, how many GPUs the jobs can share: idle GPUs that no pod waits for, and GPUs of lent pods.

        Lent pods are workers, whose GPUs an arbiter shares, and teachers on borrowed GPUs. If a node takes no new pods,
        or is gone, its workers keep their GPUs until their pods are asked to end: the node may be back in seconds.
        Likewise, a node counts as having at least the GPUs that its pods hold: after a kubelet restarts, it reports no
        GPUs until the device plugin is back.
        """
        held: dict[str, dict[str, int]] = {name: {} for name in self._nodes}
        kept: Counter[str] = Counter()
        for pod in self._pods.values():
            if pod.node in held and not pod.ended and not is_lent(pod):
                add_amounts(held[pod.node], pod.requests)
            if pod.node and not pod.ended and not pod.deleting and is_worker(pod):
                kept[pod.node] += pod.requests.get(GPU, 0) // ONE
        free = self._free(lambda pod: not is_lent(pod), held)
        usable = {
            node.name: node.allocatable.get(GPU, 0)
            for node in self._nodes.values()
            if node.usable and (GPU in node.allocatable or kept[node.name])
        }
        devices = {name: count for name, count in kept.items() if count and name not in usable}
        for name, allocatable in usable.items():
            missing = max(0, self._held[name].get(GPU, 0) - allocatable)
            devices[name] = max(0, (free[name].get(GPU, 0) + missing) // ONE)
        return devices

    def _usable(self, claim: PodClaim) -> list[NodeCapacity]:
        return [
            node
            for node in self._nodes.values()
            if node.usable and claim.rules.allow(node.name, node.labels, node.taints)
        ]

    def _free(
        self, comes_first: Callable[[PodClaim], bool], held: Mapping[str, Amounts] | None = None
    ) -> dict[str, dict[str, int]]:
        """Return what is left of each node's resources after the waiting pods that take precedence."""
        held = self._held if held is None else held
        free = {name: dict(node.allocatable) for name, node in self._nodes.items()}
        for name in free:
            add_amounts(free[name], held.get(name, {}), -1)
        for pod in self._nominated:
            if comes_first(pod):
                add_amounts(free[pod.nominated_node], pod.requests, -1)
        hopeless: set[str] = set()  # of equal pods, such as a job's, the first that fits nowhere decides for all
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
    """Return whether a waiting pod comes before the newer `claim`: yes, unless the waiting pod has a lower priority."""
    return pod.priority is None or claim.priority is None or pod.priority >= claim.priority


def _count_of(requests: Amounts, free: Amounts) -> int:
    return max(0, min((free.get(name, 0) // amount for name, amount in requests.items()), default=0))


_KEPT_S: Final = 60.0
"""How long the last capacity stays valid while the API server does not answer. If the silence lasts longer, access was
probably withdrawn."""


class CapacityWatch:
    """Watches nodes and pods, and calls `on_change` when capacity may have changed.

    `on_pod` is called with pods' events, like `KubeWatch`'s `on_change`.
    """

    def __init__(
        self,
        client: KubeClient,
        on_change: Callable[[], object] = lambda: None,
        on_pod: Callable[[str, Object | None], object] = lambda change, pod: None,
    ) -> None:
        self._on_change = on_change
        self._on_pod = on_pod
        self._lock = threading.Lock()
        self._nodes = _Parsed(NodeCapacity.of)
        self._pods = _Parsed(PodClaim.of)
        self._built: ClusterCapacity | None = None
        self._stale_since_s: float | None = None
        self._reason = ""
        self._ready = threading.Event()  # a watch's thread may be faster than this constructor
        self._node_watch = KubeWatch(client, resource_types.NODES, "", on_change=self._take_node)
        self._pod_watch = KubeWatch(client, resource_types.PODS, "", on_change=self._take_pod)
        self._ready.set()

    @property
    def reason(self) -> str:
        """Why capacity is unknown or stale; empty if it is current."""
        return self._node_watch.stale or self._pod_watch.stale

    def current(self) -> ClusterCapacity | None:
        """Return the capacity, rebuilt after changes; None if it is unknown."""
        with self._lock:
            if not (self._nodes.known and self._pods.known):
                return None
            since_s = self._stale_since_s
            if since_s is not None and time.monotonic() - since_s > _KEPT_S:
                return None
            if self._built is None:
                self._built = ClusterCapacity(list(self._nodes.found.values()), list(self._pods.found.values()))
            return self._built

    def close(self) -> None:
        self._node_watch.close()
        self._pod_watch.close()

    def _take_node(self, change: str, node: Object | None) -> None:
        self._take(self._nodes, change, node)

    def _take_pod(self, change: str, pod: Object | None) -> None:
        self._on_pod(change, pod)
        self._take(self._pods, change, pod)

    def _take(self, parsed: _Parsed[Any], change: str, obj: Object | None) -> None:
        self._ready.wait()
        watch = self._node_watch if parsed is self._nodes else self._pod_watch
        with self._lock:
            if change != "STALE":
                if not parsed.take(change, obj, watch):
                    return
                self._built = None
            if not self.reason:
                self._stale_since_s = None
            elif self._stale_since_s is None:
                self._stale_since_s = time.monotonic()
            before, self._reason = self._reason, self.reason
        if self._reason != before:
            what = f"is unknown: {self._reason}" if self._reason else "is known"
            logger.info("idle capacity of the cluster %s", what)
        self._on_change()


class _Parsed(Generic[T]):
    """Objects of a watch, each parsed once; unreadable ones are skipped."""

    def __init__(self, parse: Callable[[Object], T]) -> None:
        self._parse = parse
        self.found: dict[str, T] = {}
        self.known = False  # whether the watch has listed its objects

    def take(self, change: str, obj: Object | None, watch: KubeWatch) -> bool:
        """Process an event; return whether it changes anything, which a node's heartbeat does not."""
        if obj is None:
            self.known = True
            self.found = {}
            for listed in watch.objects.values():
                self._put(listed)
            return True
        uid = _uid(obj)
        before = self.found.pop(uid, None)
        if change != "DELETED":
            self._put(obj)
        return self.found.get(uid) != before

    def _put(self, obj: Object) -> None:
        try:
            self.found[_uid(obj)] = self._parse(obj)
        except ValueError as exc:
            logger.warning("%s is skipped: %s", (obj.get("metadata") or {}).get("name"), exc)


def _uid(obj: Object) -> str:
    metadata = obj.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name") or "")
