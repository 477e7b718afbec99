"""What stores say about jobs and pools: how many members are wanted, and the progress of the work.

`StoreAllowlist` decides which stores the operator may open with its own tokens, certificates and network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from edl.background import BackgroundLoop, start_call
from edl.discovery import Store, open_store
from edl.discovery.store import Entry, StoreSnapshot, StoreWatch
from edl.discovery.store_url import KUBERNETES_GONE, identify_server, identify_store
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.load_reporting.wanted import WantedKind, parse_wanted, wanted_key
from edl.master.kube.observation import StoreAnswer, WorkProgress
from edl.master.naming import report_key
from edl.master.scaling.advisor import ScalingAdvisor
from edl.master.scaling.workers import WorkLeft, read_number
from edl.quoting import shown

logger = logging.getLogger(__name__)


_SCHEMES: Final = ("consul", "consul+https", "etcd", "etcd+https", "edl")
"""Schemes that can be allowed. A `sqlite:` file would be on the operator's own machine."""
_ETCD: Final = ("etcd", "etcd+https")


@dataclass(frozen=True)
class StoreAllowlist:
    """Stores that may be opened: the operator's own, stores on the same server, and stores with an allowed prefix.

    The author of a resource chooses its store. If the operator opened every store, it would send its token to any host,
    and would send requests to addresses that only the operator can reach. A prefix is `SCHEME://HOST:PORT`,
    `SCHEME://HOST` for any port, or `SCHEME://` for any host.

    Raises:
        SettingsError: a prefix has a different form.
    """

    own: str = ""
    prefixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            if not _is_prefix(prefix):
                raise SettingsError(
                    f"--allow-store {shown(prefix.partition('?')[0].rpartition('@')[2])}: expected SCHEME://HOST:PORT,"
                    f" SCHEME://HOST or SCHEME://, with a scheme of {', '.join(_SCHEMES)}"
                )

    def find_refusal(self, url: str) -> str:
        """Return why a store is not opened, for the author of its URL; empty if it is allowed."""
        if url == self.own or identify_store(url) == identify_store(self.own):
            return ""
        parts = _split(url)
        if parts is not None and parts.scheme == "kubernetes":
            return KUBERNETES_GONE
        if parts is None or parts.scheme not in (*_SCHEMES, "sqlite"):
            return "not a store URL"
        if parts.scheme == "sqlite":
            return "a file on the operator's machine, which the operator opens only as its own --store"
        if extras := _find_extras(parts):
            return f"a URL with {extras}, which the operator does not accept from a resource"
        own = _split(self.own)
        if own is not None and own.scheme not in (*_SCHEMES, "sqlite"):
            own = None  # such a store is never opened
        try:
            members, own_members = _list_members(parts), [] if own is None else _list_members(own)
        except ValueError as exc:
            return f"not a store URL: {shown(str(exc))}"
        if "" in members:
            return "a URL without a host"
        allowed = [] if own is None else [(own.scheme, member) for member in own_members]
        for member in members:
            if (parts.scheme, member) not in allowed and not self._is_listed(parts.scheme, member):
                prefix = shown(f"{parts.scheme}://{member}")
                return f"to have the operator read it, start the operator with --allow-store {prefix}"
        return ""

    def _is_listed(self, scheme: str, member: str) -> bool:
        for prefix in self.prefixes:
            listed = urlsplit(prefix)
            if listed.scheme != scheme:
                continue
            (place,) = _list_members(listed) if listed.netloc else ("",)
            if place in ("", member) or (listed.port is None and _host_of(place) == _host_of(member)):
                return True
        return False


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:
            _ = parts.port  # parsed on access
    except ValueError:
        return None
    return parts


def _find_extras(parts: SplitResult) -> str:
    if "@" in parts.netloc:
        return "a user"
    if parts.path not in ("", "/") or parts.fragment:
        return "a path"
    return "options" if parts.query else ""


def _list_members(parts: SplitResult) -> list[str]:
    """Return the servers of a URL in normalized form, [""] if it names none; ValueError for an invalid host or port."""
    if parts.scheme == "sqlite" or not parts.netloc:
        return [parts.netloc.lower()]
    members = parts.netloc.split(",") if parts.scheme in _ETCD else [parts.netloc]
    return [identify_server(parts.scheme, member.strip()) for member in members]


def _is_prefix(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _list_members(parts)
    except ValueError:
        return False
    # A missing port, as in `edl://a:`, matches nothing.
    return parts.scheme in _SCHEMES and not (_find_extras(parts) or "," in text or parts.netloc.endswith(":"))


def _host_of(member: str) -> str:
    """Return the host of `HOST:PORT`, with the brackets of an IPv6 address."""
    host, colon, port = member.rpartition(":")
    return host if colon and port.isdigit() else member


def read_progress(left: WorkLeft, value: bytes, now_s: float) -> WorkProgress | None:
    """Return the progress in a master's latest report; None if the report is unreadable or has no data sets."""
    try:
        report = json.loads(value)
    except (ValueError, RecursionError):
        return None
    found = report.get("datasets") if isinstance(report, dict) else None
    datasets = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    if not datasets:
        return None
    left_s = left.look(datasets, now_s)
    remaining_s = None if left_s is None or not left_s < 1e9 else round(left_s)
    return WorkProgress(find_percentage(datasets), remaining_s)


def find_percentage(datasets: Sequence[Mapping[str, Any]]) -> int | None:
    """Return which percentage of the data sets is done; None if a data set is endless or still growing."""
    done, whole = 0.0, 0.0
    for dataset in datasets:
        units_done, units, epochs = (read_number(dataset.get(name)) for name in ("units_done", "units", "epochs"))
        if dataset.get("finished") is True:
            size = units_done
        elif dataset.get("units") is None or not epochs:
            return None
        else:
            size = units * epochs
        done += min(units_done, size)
        whole += size
    return min(100, int(100 * done / whole)) if whole > 0 else 100


_WATCH_S: Final = 1.0  # longest wait for a snapshot, and so of `close`
_PROGRESS_S: Final = 10.0  # at most this often, as each change of a status is a write; a master reports each second
_AWAY_S: Final = 30.0  # until resources say so: a store that is being replaced is unreachable for seconds
_SILENT_S: Final = 600.0
"""If the number of wanted workers has not been written for this long, the number is outdated: an advisor writes it
at least every ten seconds, and a master that lost its node is back within two minutes."""
_UNANSWERED: Final = "it has not answered yet"


class StoreFollower:
    """Watches `wanted/` and `master_reports/` in a store.

    `on_change` is called, in any thread, with a key in the store if its value has changed in a way that concerns
    resources; an empty key stands for all keys. Raises SettingsError if the URL is invalid, DiscoveryError if the store
    cannot be opened now.
    """

    def __init__(self, url: str, on_change: Callable[[str], None]) -> None:
        self._url = url
        self._on_change = on_change
        self._lock = threading.Lock()
        self._wanted: dict[str, tuple[bytes, int | None]] = {}
        self._reports: dict[str, tuple[bytes, WorkProgress | None]] = {}
        self._left: dict[str, WorkLeft] = {}
        self._told_s: dict[str, float] = {}
        self._written_s: dict[str, float] = {}
        self._silent: frozenset[str] = frozenset()
        self._stale = _UNANSWERED
        self._away_since_s: float | None = time.monotonic()
        self._unreachable = ""
        self._store: Store = open_store(url)
        self._advisor: ScalingAdvisor | None = None
        self._watches: list[StoreWatch] = []
        self._loops: list[BackgroundLoop] = []
        for prefix, take in (("wanted/", self._take_wanted), ("master_reports/", self._take_reports)):
            watch = self._store.watch(prefix)
            self._watches.append(watch)
            self._loops.append(BackgroundLoop("edl-operator-store", functools.partial(self._step, watch, take)))

    def ask(self, kind: WantedKind, name: str) -> StoreAnswer:
        """Return the answer from the last snapshots; sends no request."""
        with self._lock:
            key = wanted_key(kind, name)
            wanted = self._wanted.get(key, (b"", None))[1]
            progress = self._reports.get(report_key(name), (b"", None))[1] if kind == "workers" else None
            return StoreAnswer(wanted, progress, self._stale, unreachable=self._unreachable, silent=key in self._silent)

    def advise(self, wanted: bool) -> None:
        """Start or stop an advisor in this process, which decides how many teachers are useful."""
        with self._lock:
            if wanted and self._advisor is None:
                self._advisor = ScalingAdvisor(self._store)
                return
            advisor = None if wanted else self._advisor
            if advisor is not None:
                self._advisor = None
        if advisor is not None:
            start_call("edl-operator-advisor-close", advisor.close)  # which waits for a store call in flight

    def close(self) -> None:
        with self._lock:
            advisor, self._advisor = self._advisor, None
        if advisor is not None:
            advisor.close()
        for watch in self._watches:
            watch.close()
        for loop in self._loops:
            loop.close(2 * _WATCH_S)
        self._store.close()

    def _step(self, watch: StoreWatch, take: Callable[[StoreSnapshot], None]) -> float | None:
        with contextlib.suppress(ClosedError):
            if (snapshot := watch.get(_WATCH_S)) is not None:
                take(snapshot)
            self._check()
            return 0.01  # a watch that was closed returns at once; the loop is closed soon after
        return None

    def _take_wanted(self, snapshot: StoreSnapshot) -> None:
        changed = []
        with self._lock:
            was_stale = self._note_stale(snapshot)
            if not snapshot.stale:
                self._away_since_s = None
                self._unreachable = ""
                found: dict[str, tuple[bytes, int | None]] = {}
                now_s, written_s = time.monotonic(), {}
                for key, entry in snapshot.entries.items():
                    before = self._wanted.get(key)
                    is_same = before is not None and before[0] == entry.value
                    found[key] = before if before is not None and is_same else (entry.value, _read_count(entry))
                    # While a store was unreachable, nothing could be written to it.
                    written_s[key] = self._written_s[key] if is_same and not was_stale else now_s
                self._written_s = written_s
                for key in found.keys() | self._wanted.keys():
                    if found.get(key, (b"", None))[1] != self._wanted.get(key, (b"", None))[1]:
                        changed.append(key)
                self._wanted = found
        for key in [""] if was_stale else changed:
            self._on_change(key)

    def _take_reports(self, snapshot: StoreSnapshot) -> None:
        now_s = time.monotonic()
        changed = []
        with self._lock:
            if snapshot.stale:
                return  # the watch of `wanted/` says so
            found: dict[str, tuple[bytes, WorkProgress | None]] = {}
            for key, entry in snapshot.entries.items():
                before = self._reports.get(key)
                if before is not None and before[0] == entry.value:
                    found[key] = before
                    continue
                progress = read_progress(self._left.setdefault(key, WorkLeft()), entry.value, now_s)
                found[key] = (entry.value, progress)
                if progress != (before[1] if before else None) and (
                    now_s - self._told_s.get(key, 0.0) >= _PROGRESS_S or _is_done(progress)
                ):
                    self._told_s[key] = now_s
                    changed.append(key)
            self._reports = found
            for key in self._left.keys() - found.keys():
                del self._left[key]
                self._told_s.pop(key, None)
        for key in changed:
            self._on_change(key)

    def _check(self) -> None:
        self._check_away()
        with self._lock:
            now_s, before = time.monotonic(), self._silent
            if not self._stale:
                self._silent = frozenset(key for key, at_s in self._written_s.items() if now_s - at_s >= _SILENT_S)
            changed = before ^ self._silent
        for key in changed:
            self._on_change(key)

    def _check_away(self) -> None:
        with self._lock:
            since_s = self._away_since_s
            if self._unreachable or since_s is None or time.monotonic() - since_s < _AWAY_S:
                return
            self._unreachable = self._stale
        self._on_change("")

    def _note_stale(self, snapshot: StoreSnapshot) -> bool:
        """Note whether the store is unreachable; return whether it has just answered again."""
        before, self._stale = self._stale, snapshot.stale
        if snapshot.stale and self._away_since_s is None:
            self._away_since_s = time.monotonic()
        if snapshot.stale and before in ("", _UNANSWERED):
            logger.warning("store %s is unreachable; wanted numbers are kept: %s", _show(self._url), snapshot.stale)
        elif before not in ("", _UNANSWERED) and not snapshot.stale:
            logger.info("store %s answers again", _show(self._url))
        return bool(before) and not snapshot.stale


def _read_count(entry: Entry) -> int | None:
    fields: Mapping[str, object] | None = parse_wanted(entry.key, entry.value)
    count = None if fields is None else fields["count"]
    return int(count) if isinstance(count, (int, float)) else None


def _is_done(progress: WorkProgress | None) -> bool:
    return progress is not None and progress.percentage == 100


_RETRY_S: Final = 30.0
_MOST_STORES: Final = 100  # besides its own: each has connections and threads, and resources choose their number
_MOST_OF_NAMESPACE: Final = 10  # so that the authors of one namespace cannot use up all


@dataclass(frozen=True)
class _Subject:
    """The store that a resource specifies, and what to ask it. `store` is the same for all spellings of `url`.

    `advised` says whether this process decides how many teachers of the service are useful.
    """

    url: str
    store: str
    kind: WantedKind
    name: str
    advised: bool
    namespace: str


class StoreDirectory:
    """Provides stores' answers about resources; calls `on_change` with a resource's key after a change. Thread-safe."""

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
        """Return a store's answer about a resource, and start to follow the store for that resource."""
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
        with self._lock:
            self._settle(self._subjects.pop(key, None))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            followers = list(self._followers.values())
            self._followers.clear()
        for follower in followers:
            follower.close()

    def _open(self, subject: _Subject) -> StoreFollower | StoreAnswer:
        url, store = subject.url, subject.store
        found = self._followers.get(store)
        if found is not None:
            return found
        failed_s, failure = self._failed.get(url, (0.0, None))
        now_s = time.monotonic()
        if self._closed:
            return StoreAnswer(stale="the operator is stopping")
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
        if subject.store == self._own:
            return ""
        others = self._followers.keys() - {self._own}
        held = {other.store for other in self._subjects.values() if other.namespace == subject.namespace} & others
        if len(held) >= _MOST_OF_NAMESPACE:
            return f"resources in namespace {subject.namespace} keep {len(held)} stores open, which is the limit"
        return f"{len(others)} stores are open, which is the limit" if len(others) >= _MOST_STORES else ""

    def _settle(self, subject: _Subject | None) -> None:
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
    """Return a URL for display, without parts that may be a token."""
    scheme, slashes, rest = url.partition("?")[0].partition("//")
    return shown(f"{scheme}{slashes}{rest.rpartition('@')[2]}")
