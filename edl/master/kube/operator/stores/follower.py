"""`StoreFollower`: a store that resources name, watched for what it says of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from edl.background import BackgroundLoop, start_call
from edl.discovery import Store, open_store
from edl.discovery.store import Entry, StoreSnapshot, StoreWatch
from edl.errors import ClosedError
from edl.load_reporting.wanted import WantedKind, parse_wanted, wanted_key
from edl.master.kube.observation import StoreAnswer, WorkProgress
from edl.master.kube.operator.stores.progress import ProgressReader
from edl.master.naming import report_key
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor
from edl.master.scaling.teacher_demand import TeacherScalingSettings

__all__ = ["StoreFollower"]

logger = logging.getLogger(__name__)

_WATCH_S: Final = 1.0
"""How long a look for a snapshot takes at most, so that `close` does not wait for longer."""
_PROGRESS_S: Final = 10.0
"""A master reports each second; the resource's status follows so often at most, as each change is a write."""
_AWAY_S: Final = 30.0
"""Without an answer, after which resources say so: a store that is replaced is away for some seconds."""
_SILENT_S: Final = 600.0
"""Without a write, after which what workers are wanted is no advisor's word any more: that writes each ten seconds, and
a master that lost its node is back within two minutes."""
_UNANSWERED: Final = "it has not answered yet"


class StoreFollower:
    """Watches `wanted/` and `master_reports/` of a store.

    Args:
        url: of the store.
        on_change: called with the key of the store whose meaning for resources has changed, from any thread.

    Raises:
        SettingsError: the URL cannot be used.
        DiscoveryError: the store cannot be opened just now.
    """

    def __init__(self, url: str, on_change: Callable[[str], None]) -> None:
        self._url = url
        self._on_change = on_change
        self._lock = threading.Lock()
        self._wanted: dict[str, tuple[bytes, int | None]] = {}
        self._reports: dict[str, tuple[bytes, WorkProgress | None]] = {}
        self._readers: dict[str, ProgressReader] = {}
        self._told_s: dict[str, float] = {}
        self._written_s: dict[str, float] = {}
        self._silent: frozenset[str] = frozenset()
        self._stale = {"wanted/": _UNANSWERED, "master_reports/": _UNANSWERED}
        self._away_since_s: float | None = time.monotonic()
        self._unreachable = ""
        self._store: Store = open_store(url)
        self._advisor: ScalingAdvisor | None = None
        self._watches: list[StoreWatch] = []
        self._loops: list[BackgroundLoop] = []
        for prefix, take in (("wanted/", self._take_wanted), ("master_reports/", self._take_reports)):
            watch = self._store.watch(prefix)
            self._watches.append(watch)
            self._loops.append(BackgroundLoop("edl-operator-store", _Step(watch, take, self._check)))

    def ask(self, kind: WantedKind, name: str) -> StoreAnswer:
        """Return what the store says, by its last snapshots; asks it nothing."""
        with self._lock:
            key = wanted_key(kind, name)
            wanted = self._wanted.get(key, (b"", None))[1]
            progress = self._reports.get(report_key(name), (b"", None))[1] if kind == "workers" else None
            return StoreAnswer(
                wanted, progress, self._stale["wanted/"], unreachable=self._unreachable, silent=key in self._silent
            )

    def advise(self, wanted: bool) -> None:
        """Have this process be among those that decide how many teachers are useful, or not."""
        with self._lock:
            if wanted and self._advisor is None:
                settings = AdvisorSettings(TeacherScalingSettings(least=0))
                self._advisor = ScalingAdvisor(self._store, settings)
                return
            advisor = None if wanted else self._advisor
            if advisor is not None:
                self._advisor = None
        if advisor is not None:
            start_call("edl-operator-advisor-close", advisor.close)  # which waits for a call of the store under way

    def close(self) -> None:
        """Watch no more, and close the store."""
        with self._lock:
            advisor, self._advisor = self._advisor, None
        if advisor is not None:
            advisor.close()
        for watch in self._watches:
            watch.close()
        for loop in self._loops:
            loop.close(2 * _WATCH_S)
        self._store.close()

    def _take_wanted(self, snapshot: StoreSnapshot) -> None:
        changed = []
        with self._lock:
            was_stale = self._note_stale("wanted/", snapshot)
            if snapshot.stale and self._away_since_s is None:
                self._away_since_s = time.monotonic()
            if not snapshot.stale:
                self._away_since_s = None
                self._unreachable = ""
                found: dict[str, tuple[bytes, int | None]] = {}
                now_s, written_s = time.monotonic(), {}
                for key, entry in snapshot.entries.items():
                    before = self._wanted.get(key)
                    is_same = before is not None and before[0] == entry.value
                    found[key] = before if before is not None and is_same else (entry.value, _read_count(entry))
                    # A store that was away may have been written to by none meanwhile.
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
            self._note_stale("master_reports/", snapshot)
            if snapshot.stale:
                return
            found: dict[str, tuple[bytes, WorkProgress | None]] = {}
            for key, entry in snapshot.entries.items():
                before = self._reports.get(key)
                if before is not None and before[0] == entry.value:
                    found[key] = before
                    continue
                progress = self._readers.setdefault(key, ProgressReader()).read(entry.value, now_s)
                found[key] = (entry.value, progress)
                if progress != (before[1] if before else None) and (
                    now_s - self._told_s.get(key, 0.0) >= _PROGRESS_S or _is_done(progress)
                ):
                    self._told_s[key] = now_s
                    changed.append(key)
            self._reports = found
            for key in self._readers.keys() - found.keys():
                del self._readers[key]
                self._told_s.pop(key, None)
        for key in changed:
            self._on_change(key)

    def _check(self) -> None:
        """Look at what time alone changes."""
        self._check_away()
        with self._lock:
            now_s, before = time.monotonic(), self._silent
            if not self._stale["wanted/"]:
                self._silent = frozenset(key for key, at_s in self._written_s.items() if now_s - at_s >= _SILENT_S)
            changed = before ^ self._silent
        for key in changed:
            self._on_change(key)

    def _check_away(self) -> None:
        """Have all resources of the store looked at once it has been away for long; the reason stays as it is then."""
        with self._lock:
            since_s = self._away_since_s
            if self._unreachable or since_s is None or time.monotonic() - since_s < _AWAY_S:
                return
            self._unreachable = self._stale["wanted/"]
        self._on_change("")

    def _note_stale(self, prefix: str, snapshot: StoreSnapshot) -> bool:
        """Note whether the store answers; return whether it does again."""
        before = self._stale[prefix]
        self._stale[prefix] = snapshot.stale
        if snapshot.stale and (not before or before == _UNANSWERED):
            logger.warning("store %s is away, and what was wanted last stays: %s", _name_of(self._url), snapshot.stale)
        elif before and before != _UNANSWERED and not snapshot.stale:
            logger.info("store %s answers again", _name_of(self._url))
        return bool(before) and not snapshot.stale


class _Step:
    """Waits for a watch's next snapshot; the step of a loop."""

    def __init__(self, watch: StoreWatch, take: Callable[[StoreSnapshot], None], check: Callable[[], None]) -> None:
        self._watch = watch
        self._take = take
        self._check = check

    def __call__(self) -> float | None:
        with contextlib.suppress(ClosedError):
            snapshot = self._watch.get(_WATCH_S)
            if snapshot is not None:
                self._take(snapshot)
            self._check()
            return 0.01  # a watch that was closed returns at once; the loop is closed soon after
        return None


def _read_count(entry: Entry) -> int | None:
    fields: Mapping[str, object] | None = parse_wanted(entry.key, entry.value)
    count = None if fields is None else fields["count"]
    return int(count) if isinstance(count, (int, float)) else None


def _is_done(progress: WorkProgress | None) -> bool:
    return progress is not None and progress.percentage == 100


def _name_of(url: str) -> str:
    """Return a URL as it is logged: without what may be a token in it."""
    head, _, tail = url.partition("?")[0].rpartition("@")
    return f"{head.partition('//')[0]}//{tail}" if head else tail
