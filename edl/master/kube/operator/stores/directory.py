"""`StoreDirectory`: the stores that resources name, each opened once, and closed when no resource names it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edl.background import start_call
from edl.discovery.urls import identify_store
from edl.errors import DiscoveryError, SettingsError
from edl.load_reporting.wanted import WantedKind, wanted_key
from edl.master.kube.observation import StoreAnswer
from edl.master.kube.operator.store_allowlist import StoreAllowlist
from edl.master.kube.operator.stores.follower import StoreFollower
from edl.master.naming import report_key
from edl.quoting import shown

__all__ = ["StoreDirectory"]

logger = logging.getLogger(__name__)

_RETRY_S: Final = 30.0
"""Between two attempts to open a store that cannot be opened."""
_MOST_STORES: Final = 100
"""Open beside the operator's own: each has connections and threads, and resources choose how many they are."""
_MOST_OF_NAMESPACE: Final = 10
"""Of these, that resources of a namespace hold open: whoever may write there cannot shut the stores of all others."""


@dataclass(frozen=True)
class _Subject:
    """What a resource wants to know, and of which store.

    Attributes:
        url: of the store, as the resource has it.
        store: the same for all URLs of one store.
        kind, name: see `StoreFollower.ask`.
        advised: whether this process decides how many teachers of the service are useful.
        namespace: of the resource.
    """

    url: str
    store: str
    kind: WantedKind
    name: str
    advised: bool
    namespace: str


class StoreDirectory:
    """Answers what stores say of resources. Thread-safe.

    Args:
        on_change: called with the key of each resource of which a store says something new.
        allowlist: which stores may be opened.
    """

    def __init__(self, on_change: Callable[[str], None], allowlist: StoreAllowlist) -> None:
        self._on_change = on_change
        self._allowlist = allowlist
        self._own = identify_store(allowlist.own)
        self._lock = threading.RLock()
        self._followers: dict[str, StoreFollower] = {}
        self._failed: dict[str, tuple[float, StoreAnswer]] = {}
        self._subjects: dict[str, _Subject] = {}
        self._closed = False

    def ask(
        self, key: str, url: str, kind: WantedKind, name: str, *, namespace: str, advised: bool = False
    ) -> StoreAnswer:
        """Return what a store says of a resource, and have `on_change` called when it says something else."""
        if reason := self._allowlist.find_refusal(url):
            self.forget(key)
            return StoreAnswer(refused=f"{_show(url)}: {reason}")
        subject = _Subject(url, identify_store(url), kind, name, advised, namespace)
        with self._lock:
            before = self._subjects.get(key)
            self._subjects[key] = subject
            if before != subject:
                self._settle(before)
            follower = self._open(subject)
            if before != subject:
                self._settle(subject)
        return follower if isinstance(follower, StoreAnswer) else follower.ask(kind, name)

    def forget(self, key: str) -> None:
        """Follow nothing more for a resource."""
        with self._lock:
            self._settle(self._subjects.pop(key, None))

    def close(self) -> None:
        """Close all stores."""
        with self._lock:
            self._closed = True
            followers = list(self._followers.values())
            self._followers.clear()
        for follower in followers:
            follower.close()

    def _open(self, subject: _Subject) -> StoreFollower | StoreAnswer:
        """Return the follower of a store, or an answer that says why there is none."""
        url, store = subject.url, subject.store
        found = self._followers.get(store)
        if found is not None:
            return found
        failed_s, failure = self._failed.get(url, (0.0, None))
        now_s = time.monotonic()
        if self._closed:
            return StoreAnswer(stale="the operator ends")
        if failure is not None and now_s - failed_s < _RETRY_S:
            return failure
        if reason := self._find_limit(subject):
            return StoreAnswer(refused=f"{_show(url)}: {reason}")
        try:
            follower = StoreFollower(url, lambda store_key: self._spread(store, store_key))
        except (SettingsError, DiscoveryError) as exc:
            permanent = isinstance(exc, SettingsError)
            failure = StoreAnswer(refused=str(exc)) if permanent else StoreAnswer(stale=str(exc), unreachable=str(exc))
            self._failed[url] = now_s, failure
            logger.warning("a store that resources name cannot be opened: %s", exc)
            return failure
        self._failed.pop(url, None)
        self._followers[store] = follower
        self._advise(store)
        return follower

    def _find_limit(self, subject: _Subject) -> str:
        """Return why a store that is not open is not opened: too many are; empty if it may be."""
        if subject.store == self._own:
            return ""
        others = self._followers.keys() - {self._own}
        held = {other.store for other in self._subjects.values() if other.namespace == subject.namespace} & others
        if len(held) >= _MOST_OF_NAMESPACE:
            return f"resources of namespace {subject.namespace} hold {len(held)} stores open, and no more are opened"
        return f"{len(others)} stores are open, and no more are opened" if len(others) >= _MOST_STORES else ""

    def _settle(self, subject: _Subject | None) -> None:
        """Close the store that nothing names any more, and let the advisor be where it is wanted."""
        if subject is None or self._closed:
            return
        if not any(other.url == subject.url for other in self._subjects.values()):
            self._failed.pop(subject.url, None)
        if any(other.store == subject.store for other in self._subjects.values()):
            self._advise(subject.store)
        elif (follower := self._followers.pop(subject.store, None)) is not None:
            start_call("edl-operator-store-close", follower.close)  # it may wait for calls of `_spread`

    def _advise(self, store: str) -> None:
        follower = self._followers.get(store)
        if follower is not None:
            follower.advise(any(subject.store == store and subject.advised for subject in self._subjects.values()))

    def _spread(self, store: str, store_key: str) -> None:
        """Say of which resources a store says something new; the empty key is all of the store's."""
        with self._lock:
            keys = [
                key
                for key, subject in self._subjects.items()
                if subject.store == store
                and store_key in ("", wanted_key(subject.kind, subject.name), report_key(subject.name))
            ]
        for key in keys:
            self._on_change(key)


def _show(url: str) -> str:
    """Return a URL as people see it: without what may be a token in it."""
    scheme, slashes, rest = url.partition("?")[0].partition("//")
    return shown(f"{scheme}{slashes}{rest.rpartition('@')[2]}")
