"""`ResourceWatches`: kopf's low-level half, which only says when to look at a resource.

kopf (https://kopf.readthedocs.io) lists and watches resources and pods, with bookmarks, finite timeouts and reconnects.
None of its handlers that keep state are used: no finalizers, no annotations, no posting, no peering, no scanning of the
cluster. What its events carry decides nothing: the reconciler reads all of it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import AccessDeniedError, EDLError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS, ResourceType
from edl.kube.settings import KubeSettings
from edl.master.kube.members.naming import JOB_LABEL, POOL_LABEL
from edl.master.kube.operator.monitoring.health import OperatorHealth
from edl.master.kube.operator.settings import ALL_NAMESPACES

__all__ = ["ResourceWatches"]

logger = logging.getLogger(__name__)

_BEAT_S: Final = 1.0
"""Between two signs of life of kopf's loop."""
_SERVER_TIMEOUT_S: Final = 290
"""After which the API server ends a watch, and the next one begins where it ended: below the 300 s after which some
load balancers cut what is silent."""
_REQUEST_TIMEOUT_S: Final = 30.0
"""Of a list; a server that has not answered by then is away."""
_SILENCE_S: Final = 90.0
"""A watch without an event or bookmark for so long is dead: bookmarks come each minute."""
_GROUP_DELAY_S: Final = 0.05
"""Events of a resource's pods that come together are a single look: thirty workers end in the same moment."""
_DENIED_WAIT_S: Final = 60.0
"""Between two looks whether a namespace that was left out may be watched by now."""
_NO_OBJECT: Final = "edl.io/no-object-has-this-label"
"""A list with this label says whether listing is allowed, and carries nothing."""
_RELIST_RATE: Final = 20.0
"""Looks a second after a new list: what went while nothing was watched has no event, so that all are looked at."""
_RELIST_MOST_S: Final = 60.0
"""Over which these looks are spread at most."""
_HUNG_S: Final = 10.0
"""After which what kopf waits for at its end is ended: it gives that 5 s, and cancels it once."""
_HUNG_AGAIN_S: Final = 1.0
"""Between two times that this is done: a watch that was between two requests has begun anew since."""
_PAUSE_WAITER: Final = "pause-waiter"
"""How names of tasks begin that kopf takes for a reason to begin a watch anew, in the place of its cancellation."""
_CRD_WAIT_S: Final = 5.0
"""Between two looks whether the CRDs are there, where they are not."""


class ResourceWatches:
    """Calls `on_key` for a resource that is new, has changed, or whose pods have, from a thread of its own.

    Args:
        client: tells whether the CRDs are there.
        settings: which cluster, and as whom.
        types: of the resources; each by a plural of its own.
        namespaces: to watch; `*` alone for all of the cluster.
        on_key: called with a resource's key, and seconds within which more may come.
        on_pod: called with each event of any pod: its type, empty where the pod was listed, and the pod.
        health: to which signs of life go.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: KubeSettings,
        types: Sequence[ResourceType],
        namespaces: Sequence[str],
        on_key: Callable[[str, float], None],
        on_pod: Callable[[str, Object], None],
        health: OperatorHealth,
    ) -> None:
        self._client = client
        self._settings = settings
        self._types = types
        self._namespaces = namespaces
        self._on_key = on_key
        self._on_pod = on_pod
        self._health = health
        self._seen: dict[str, tuple[object, ...]] = {}
        self._listed: dict[tuple[str, str], set[str]] = {}
        self._backoff = Backoff(1.0, 30.0, jitter=0.2)
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closing = False
        self._absent = ""
        self._denied: dict[str, AccessDeniedError] = {}
        self._loop = BackgroundLoop("edl-kopf", self._step, self._interrupt)

    def close(self) -> None:
        """Watch no more."""
        self._closing = True
        self._loop.close(10.0)

    def _interrupt(self) -> None:
        running = self._running
        if running is not None:
            loop, stop = running
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                return  # the loop has just ended

    def _step(self) -> float | None:
        self._health.beat()
        if self._closing:
            return None
        try:
            absent = self._find_absent()
            if absent:
                if absent != self._absent:
                    logger.warning("%s; the operator waits for it", absent)
                self._absent = absent
                self._health.set_waiting(absent)
                return _CRD_WAIT_S
            self._absent = ""
            asyncio.run(self._follow(self._find_watchable()))
        except EDLError as exc:
            self._health.set_waiting(str(exc))
            logger.warning("resources cannot be watched: %s", exc)
            return min(_CRD_WAIT_S, self._backoff.next_wait_s())
        except Exception as exc:  # noqa: BLE001 - kopf's own errors are not told apart: it ends on those it cannot mend
            self._health.set_waiting(f"the watches ended: {exc}")
            logger.warning("the watches ended, and begin anew: %s: %s", type(exc).__name__, exc)
            return self._backoff.next_wait_s()
        return None if self._closing else self._backoff.next_wait_s()

    def _find_absent(self) -> str:
        """Return which CRD is missing, in words; empty if all are there."""
        for kind in self._types:
            if not self._client.has_resource(kind.group, kind.version, kind.plural):
                return f"the cluster has no resource {kind.plural}.{kind.group}/{kind.version}: install the CRD"
        return ""

    def _find_watchable(self) -> list[str]:
        """Return the namespaces in which resources and pods may be listed; the others are left out, and said once.

        Raises:
            AccessDeniedError: there is none.
        """
        found, denied = [], {}
        for namespace in self._namespaces:
            where = "" if namespace == ALL_NAMESPACES else namespace
            try:
                for kind in (*self._types, PODS):
                    self._client.list(kind, where, label_selector=_NO_OBJECT)
            except AccessDeniedError as exc:
                denied[namespace] = exc
            else:
                found.append(namespace)
        if not found:
            raise next(iter(denied.values()))
        for namespace in sorted(denied.keys() - self._denied.keys()):
            logger.warning("namespace %s is left out until this is allowed: %s", namespace, denied[namespace])
        self._denied = denied
        return found

    async def _follow(self, namespaces: Sequence[str]) -> None:
        import kopf

        registry, settings, ending = self._register(), kopf.OperatorSettings(), asyncio.Event()

        @kopf.on.cleanup(registry=registry)
        async def note_end(**_: Any) -> None:
            ending.set()

        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.peering.standalone = True
        settings.process.ultimate_exiting_timeout = None
        settings.watching.server_timeout = _SERVER_TIMEOUT_S
        settings.watching.client_timeout = _SERVER_TIMEOUT_S + 30.0
        settings.watching.connect_timeout = _REQUEST_TIMEOUT_S
        settings.watching.inactivity_timeout = _SILENCE_S
        settings.networking.request_timeout = _REQUEST_TIMEOUT_S
        stop, ready = asyncio.Event(), asyncio.Event()
        self._running = asyncio.get_running_loop(), stop
        self._look_again(list(self._seen))
        self._seen.clear()
        self._listed.clear()
        tasks = [asyncio.create_task(self._beat(ready, namespaces))]
        if self._denied:
            tasks.append(asyncio.create_task(self._retry_denied(stop)))
        tasks.append(asyncio.create_task(_end_hung(ending, {*asyncio.all_tasks(), *tasks})))
        try:
            if self._closing:
                return
            everywhere = ALL_NAMESPACES in namespaces
            await kopf.operator(
                registry=registry,
                settings=settings,
                standalone=True,
                clusterwide=everywhere,
                namespaces=() if everywhere else tuple(namespaces),
                stop_flag=stop,
                ready_flag=ready,
            )
        finally:
            self._running = None
            for task in tasks:
                task.cancel()

    async def _retry_denied(self, stop: asyncio.Event) -> None:
        """Begin the watches anew when a namespace that was left out may be watched."""
        before = set(self._denied)
        while True:
            await asyncio.sleep(_DENIED_WAIT_S)
            with contextlib.suppress(EDLError):
                await asyncio.to_thread(self._find_watchable)
                if set(self._denied) != before:
                    stop.set()
                    return

    async def _beat(self, ready: asyncio.Event, namespaces: Sequence[str]) -> None:
        announced = False
        while True:
            self._health.beat()
            if ready.is_set() and not announced:
                announced = True
                self._backoff.reset()
                self._health.set_waiting("")
                logger.info("resources and pods are watched in %s", ", ".join(namespaces))
            await asyncio.sleep(_BEAT_S)

    def _register(self) -> Any:
        import kopf

        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> Any:
            return await asyncio.to_thread(_read_credentials, self._settings)

        for kind in self._types:

            @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"edl-{kind.plural}")
            async def on_resource(event: Any, kind: ResourceType = kind, **_: Any) -> None:
                self._take_resource(kind, event)

        @kopf.on.event(PODS.version, PODS.plural, registry=registry, id="edl-pods")
        async def on_pod(event: Any, **_: Any) -> None:
            self._take_pod(event)

        return registry

    def _take_resource(self, kind: ResourceType, event: Any) -> None:
        """Ask for a look, unless only the status has changed, which the operator itself writes."""
        metadata = event["object"]["metadata"]
        self._note_list(kind.plural, event)
        key = f"{kind.plural}/{metadata['namespace']}/{metadata['name']}"
        if event["type"] == "DELETED":
            self._seen.pop(key, None)
        else:
            parts = ("uid", "generation", "deletionTimestamp", "labels", "annotations")
            seen = tuple(repr(metadata.get(part)) for part in parts)
            if self._seen.get(key) == seen:
                return
            self._seen[key] = seen
        self._on_key(key, 0.0)

    def _note_list(self, plural: str, event: Any) -> None:
        """Notice that a kind is listed anew, as what is known is listed: kopf says nothing of that, nor of what went.

        So it is after an answer 410, such as of an API server that has started again.
        """
        metadata = event["object"]["metadata"]
        namespace, uid = metadata["namespace"], str(metadata.get("uid"))
        listed = self._listed.setdefault((plural, namespace), set())
        if event["type"] == "DELETED":
            listed.discard(uid)
            return
        if event["type"] is None and uid in listed:
            listed.clear()
            self._look_again([key for key in self._seen if key.split("/")[1] == namespace])
        listed.add(uid)

    def _look_again(self, keys: Sequence[str]) -> None:
        spread_s = min(_RELIST_MOST_S, len(keys) / _RELIST_RATE)
        for key in keys:
            self._on_key(key, random.uniform(0.0, spread_s))

    def _take_pod(self, event: Any) -> None:
        self._on_pod(str(event["type"] or ""), dict(event["object"]))
        self._note_list(PODS.plural, event)
        metadata = event["object"]["metadata"]
        labels = metadata.get("labels") or {}
        plurals = {JOB_LABEL: "elasticjobs", POOL_LABEL: "teacherpools"}
        for label, plural in plurals.items():
            if labels.get(label):
                self._on_key(f"{plural}/{metadata['namespace']}/{labels[label]}", _GROUP_DELAY_S)


async def _end_hung(ending: asyncio.Event, ours: Collection[asyncio.Task[Any]]) -> None:
    """End watches that hinder kopf from ending, such as when a CRD was deleted, after which nothing is watched.

    kopf (1.45) cancels a watch together with the task that waits for a pause. A watch that has no answer yet may then
    take the end of that task for the pause, not end, and wait for credentials that nobody brings any more. Cancelled
    alone it ends.

    Args:
        ending: is set when kopf ends.
        ours: tasks that are not kopf's.
    """
    await ending.wait()
    await asyncio.sleep(_HUNG_S)
    while True:
        for task in asyncio.all_tasks().difference(ours, {asyncio.current_task()}):
            if not task.get_name().startswith(_PAUSE_WAITER):
                logger.info("a watch has not ended, and is cancelled: %s", task.get_name())
                task.cancel()
        await asyncio.sleep(_HUNG_AGAIN_S)


def _read_credentials(settings: KubeSettings) -> Any:
    """Return kopf's credentials, read afresh: kopf asks again when they were refused."""
    import kopf

    with KubeClient(settings) as client:
        found = client.configuration
        header = found.get_api_key_with_prefix("BearerToken") or found.get_api_key_with_prefix("authorization") or ""
        scheme, _, token = header.rpartition(" ")
        return kopf.ConnectionInfo(
            server=client.url,
            ca_path=found.ssl_ca_cert,
            insecure=not found.verify_ssl,
            username=found.username or None,
            password=found.password or None,
            scheme=scheme or None,
            token=token or None,
            certificate_path=found.cert_file,
            private_key_path=found.key_file,
            proxy_url=found.proxy,
        )
