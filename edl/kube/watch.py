"""Follows all objects of a kind (`KubeWatch`), with a list request and a watch that continues from the list.

The protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import ClosedError, EDLError, KubernetesError
from edl.kube.client import KubeClient
from edl.kube.connection import Stream
from edl.kube.objects import Object
from edl.kube.resource_types import ResourceType
from edl.kube.responses import ExpiredError
from edl.quoting import shown

logger = logging.getLogger(__name__)

ObjectKey: TypeAlias = tuple[str, str]
"""Namespace and name; the namespace is empty for cluster-scoped kinds."""

_LENGTH_S: Final = 240.0
"""Length of a watch, after which a new one continues: this also ends connections that died unnoticed."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.2, 5.0
"""First and longest wait after failures: the watch notices a restarted API server, or a permission granted later,
within 5 s."""
_SHORTEST_S: Final = 1.0  # a watch that ended sooner was cut off on the way, and is not retried at full speed

_CLOSE_S: Final = 2.0  # for `close` to wait for a request that cannot be interrupted, such as a connection attempt


class KubeWatch:
    """Follows all objects of a kind in a background thread, until it is closed.

    While the API server is unreachable, the last known objects remain, and `stale` contains the reason. When the server
    answers again, the objects are listed again. A change that was undone in the meantime is not seen.

    Args:
        client: the client that sends the requests; it stays open when the watch is closed.
        namespace: empty for the whole cluster; None for the client's default namespace.
        on_change: called in the watch's thread with `ADDED`, `MODIFIED` or `DELETED` and the object; with `LISTED` and
            None if all objects may have changed; and with `STALE` and None if the server is unreachable.
        length_s: seconds after which the server ends a watch request and a new request continues.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: ResourceType,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        on_change: Callable[[str, Object | None], object] = lambda change, obj: None,
        length_s: float = _LENGTH_S,
    ) -> None:
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._selectors = {"labelSelector": label_selector} if label_selector else {}
        self._on_change = on_change
        self._length_s = length_s
        self._objects: dict[ObjectKey, Object] = {}
        self._resource_version = ""
        self.listed = False  # whether the server has answered once: before that, no objects means nothing
        self.error: EDLError | None = None  # why the server does not answer now
        self._stream: Stream | None = None
        self._closed = False
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, jitter=0.5)
        self._loop = BackgroundLoop("edl-kube-watch", self._step, self._interrupt)

    @property
    def objects(self) -> Mapping[ObjectKey, Object]:
        """All objects, as last known, in a mapping that does not change. Do not modify the objects."""
        return MappingProxyType(self._objects)

    @property
    def stale(self) -> str:
        """Why the API server does not answer; empty while it answers."""
        return "" if self.error is None else str(self.error)

    def close(self) -> None:
        """Stop following. May be called twice, and by `on_change`."""
        if self._closed:
            return
        self._closed = True
        self._loop.close(_CLOSE_S)

    def _interrupt(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.interrupt()

    def _step(self) -> float | None:
        begun = time.monotonic()
        try:
            if not self._resource_version:
                self._list()
            self._follow()
        except ExpiredError as exc:
            logger.debug("watching %s: listed again: %s", self._kind.plural, exc)
            self._resource_version = ""
        except ClosedError:
            return None
        except EDLError as exc:
            if self._closed:
                return None
            self._resource_version = ""
            self._set_error(exc)
            hint_s = exc.retry_after_s if isinstance(exc, KubernetesError) else 0.0
            return max(self._backoff.next_wait_s(), min(hint_s, _LAST_RETRY_S))
        if time.monotonic() - begun < _SHORTEST_S:
            return self._backoff.next_wait_s()
        return 0.0

    def _list(self) -> None:
        selector = self._selectors.get("labelSelector", "")
        found = self._client.list(self._kind, self._namespace, label_selector=selector)
        self._objects = {_key(obj): obj for obj in found.items}
        self._resource_version = found.resource_version
        self.listed = True
        if self.error is not None:
            logger.debug("watching %s: the API server answers again", self._kind.plural)
            self.error = None
        self._announce("LISTED", None)

    def _follow(self) -> None:
        # Spread out watches that started together, so that they do not all reconnect at once.
        length_s = round(self._length_s * random.uniform(0.75, 1.0))
        stream = self._client.watch(self._kind, self._namespace, self._resource_version, self._selectors, length_s)
        self._stream = stream
        try:
            if self._closed:
                return
            heard = False
            for line in stream.lines():
                self._take(line)
                self._backoff.reset()
                heard = True
            if not heard:
                # A server sends a bookmark before it ends a watch, unless it never had the version to continue from: it
                # was restored from a backup, and would be silent until its versions reach that one again.
                self._resource_version = ""
        finally:
            self._stream = None
            stream.close()

    def _take(self, line: bytes) -> None:
        change, obj = _parse_event(self._client.url, line)
        metadata = obj.get("metadata") or {}
        self._resource_version = str(metadata.get("resourceVersion") or self._resource_version)
        if change == "BOOKMARK":
            return
        objects = dict(self._objects)
        if change == "DELETED":
            objects.pop(_key(obj), None)
        else:
            objects[_key(obj)] = obj
        self._objects = objects
        self._announce(change, obj)

    def _set_error(self, error: EDLError) -> None:
        before, self.error = self.stale, error
        if not before:
            logger.debug("watching %s: keeping the last known objects: %s", self._kind.plural, error)
        if str(error) != before:
            self._announce("STALE", None)

    def _announce(self, change: str, obj: Object | None) -> None:
        if not self._closed:
            self._on_change(change, obj)


def _key(obj: Object) -> ObjectKey:
    metadata = obj.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _parse_event(url: str, line: bytes) -> tuple[str, Object]:
    try:
        event: Any = json.loads(line)
        change, obj = event["type"], event["object"]
        found = isinstance(change, str) and isinstance(obj, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        found = False
    if not found:
        words = shown(line[:200].decode(errors="replace"))
        raise KubernetesError(f"{url}: the watch returned something that is not an event: {words}")
    if change == "ERROR":
        code = obj.get("code")
        words = f"{url}: the watch ended ({code} {shown(obj.get('message') or '')})"
        raise ExpiredError(words) if code == 410 else KubernetesError(words)
    return change, obj
