"""`Operator`: starts all parts of the operator, and ends them."""

from __future__ import annotations

import logging
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from typing_extensions import Self

from edl.errors import SettingsError
from edl.http_server.health import HealthChecks, HealthServer
from edl.kube.client import KubeClient
from edl.kube.resource_types import PODS, TEACHER_POOLS
from edl.kube.responses import Call
from edl.kube.settings import KubeSettings
from edl.master.kube.capacity import CapacityWatch
from edl.master.kube.members.pod_policy import PodPolicy
from edl.master.kube.members.pods import OWNER_UID_LABEL
from edl.master.kube.operator.events import EventRecorder
from edl.master.kube.operator.looks import ALL_NAMESPACES, ResourceWatches, WorkQueue
from edl.master.kube.operator.monitoring import GiveBackMeter, OperatorHealth, OperatorMetrics
from edl.master.kube.operator.reconciler import KINDS, Reconciler
from edl.master.kube.operator.stores import StoreAllowlist
from edl.master.kube.operator.surroundings import LiveSurroundings
from edl.master.kube.resources import TeacherPool, parse_teacher_pool

logger = logging.getLogger(__name__)

_JITTER: Final = 0.5  # of the resync interval: spreads resources that were created together


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of an operator.

    Attributes:
        kube: Cluster and user.
        namespaces: Namespaces whose resources it manages. Empty for its own, `*` for the whole cluster.
        store: URL of the store for resources that name none; empty for none.
        allow_stores: Prefixes of additional stores that it may open: see `StoreAllowlist`.
        pods: Limits on pod templates.
        workers: Number of resources reconciled concurrently.
        resync_s: Seconds after which each resource is reconciled even without an event, less often if there are many
            resources. This finds changes that no event reported.
        resync_rate: Largest number of such reconciliations per second. Each takes two requests.
        capacity: Whether to watch nodes and all pods of the cluster, if allowed.
        host: Address where `/livez`, `/readyz` and `/metrics` are served; None for nowhere.
        port: Port of that address; 0 for any.

    Raises:
        SettingsError: `workers` is out of range, `*` is not alone, or a prefix of a store is invalid.
    """

    kube: KubeSettings = field(default_factory=KubeSettings)
    namespaces: tuple[str, ...] = ()
    store: str = ""
    allow_stores: tuple[str, ...] = ()
    pods: PodPolicy = field(default_factory=PodPolicy)
    workers: int = 4
    resync_s: float = 600.0
    resync_rate: float = 0.2
    capacity: bool = True
    host: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 32:
            raise SettingsError(f"workers={self.workers!r}: expected 1 to 32")
        StoreAllowlist(self.store, self.allow_stores)
        if ALL_NAMESPACES in self.namespaces and len(self.namespaces) > 1:
            raise SettingsError(f"namespaces={','.join(self.namespaces)}: {ALL_NAMESPACES} already includes them all")


class Operator:
    """Manages the resources of its namespaces, in its own threads, until it is closed.

    Two operators at once do no harm: the second finds the first one's work done.

    Args:
        settings: Settings of the operator.

    Raises:
        SettingsError: No cluster is configured, or the operator cannot listen on the given address.
    """

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self.metrics: Final = OperatorMetrics()
        self._give_backs = GiveBackMeter(self.metrics.registry)
        with ExitStack() as stack:
            self._client = stack.enter_context(KubeClient(settings.kube, self._note_request))
            self._queue = WorkQueue(self._work, workers=settings.workers, on_result=self.metrics.count_reconcile)
            self.health: Final = OperatorHealth(self._queue.get_stuck_s)
            self.namespaces = settings.namespaces or (self._client.namespace,)
            self._events = EventRecorder(self._client, self._client.server_clock.read)
            stack.callback(self._events.close)
            allowlist = StoreAllowlist(settings.store, settings.allow_stores)
            self._surroundings = LiveSurroundings(
                self._queue.add,
                allowlist,
                self._has_pods,
                self._list_pools,
                self.namespaces,
                self._client.server_clock.read,
            )
            stack.callback(self._surroundings.close)
            self._reconciler = Reconciler(
                self._client,
                self._surroundings,
                self._events.record,
                default_store=settings.store,
                policy=settings.pods,
                clock=self._client.server_clock.read,
            )
            stack.callback(self._queue.close)
            self.port = self._serve(stack)
            self._watch(stack)
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Stop; wait for work in progress, for about ten seconds at most."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, stack: ExitStack) -> int | None:
        if self._settings.host is None:
            return None
        checks = HealthChecks()
        checks.add("/livez", "operator", self.health.check_live)
        checks.add("/readyz", "operator", self.health.check_ready)
        server = HealthServer(self._settings.host, self._settings.port, self.metrics.registry, checks)
        stack.callback(server.close)
        return server.port

    def _watch(self, stack: ExitStack) -> None:
        if self._settings.capacity:
            capacity = CapacityWatch(self._client, self._surroundings.note_capacity, self._give_backs.record)
            stack.callback(capacity.close)
            self._surroundings.set_capacity(capacity.current)
        types = [kind.type for kind in KINDS.values()]
        watches = ResourceWatches(
            self._client, types, self.namespaces, self._queue.add, self._reconciler.is_own_status, self.health
        )
        stack.callback(watches.close)

    def _has_pods(self, namespace: str, uid: str) -> bool:
        selector = f"{OWNER_UID_LABEL}={uid}"
        return bool(self._client.list(PODS, namespace, label_selector=selector).items)

    def _list_pools(self, namespace: str) -> list[TeacherPool]:
        where = "" if namespace == ALL_NAMESPACES else namespace
        listed = self._client.list(TEACHER_POOLS, where).items
        parsed = [parse_teacher_pool(resource, self._settings.store) for resource in listed]
        return [pool for pool in parsed if isinstance(pool, TeacherPool)]

    def _work(self, key: str) -> float | None:
        wait_s = self._reconciler.reconcile(key)
        if wait_s is None:
            return None
        resync_s = max(self._settings.resync_s, len(self._queue) / self._settings.resync_rate)
        return min(wait_s, resync_s * random.uniform(1.0 - _JITTER, 1.0 + _JITTER))

    def _note_request(self, call: Call, code: int) -> None:
        if not self.health.note_request(code):
            return
        if code == 0 or code >= 500:
            words = "the API server does not answer (%s): pods keep running, and the operator waits"
            logger.warning(words, call)
        else:
            logger.info("the API server answers again")
