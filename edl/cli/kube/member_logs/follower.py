"""Logs of all members at once, across the pods that follow one another, until the job has ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from edl.background import start_call
from edl.cli.kube.member_logs.pod_log import PodLog
from edl.cli.kube.member_logs.selection import MemberPodLog, select_present, sort_pods
from edl.cli.kube.phases import FINAL_PHASES, PhaseObserver
from edl.cli.kube.targets import Target
from edl.errors import KubernetesError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import PODS
from edl.master.kube.members.naming import JOB_LABEL, OWNER_UID_LABEL, POOL_LABEL

__all__ = ["FollowOptions", "LogFollower", "list_pods"]

_LOOK_S: Final = 1.0
"""Between two looks for new pods."""
_MAX_WAITING: Final = 10_000
"""Lines that wait to be written: a terminal that is slow holds the readers up, and the memory does not grow."""
_DRAIN_S: Final = 5.0
"""For the last lines, once the job has ended: its pods have written all, and only connections are slow."""


@dataclass(frozen=True)
class FollowOptions:
    """Which logs to follow.

    Attributes:
        role: only of these members; None for all.
        index: only of this member; None for all.
        tail_lines: of what was written before; None for all.
    """

    role: str | None = None
    index: int | None = None
    tail_lines: int | None = None


def list_pods(client: KubeClient, target: Target) -> list[Object]:
    """Return the pods of a job or pool.

    Args:
        client: of the cluster.
        target: whose.
    """
    label = JOB_LABEL if target.kind == "job" else POOL_LABEL
    uid = target.resource.get("metadata", {}).get("uid")
    return client.list(PODS, label_selector=f"{label}={target.name},{OWNER_UID_LABEL}={uid}").items


class LogFollower:
    """Follows the logs of a job or pool.

    Args:
        client: of the cluster.
        target: whose.
        options: of which members.
        write: called with each line, in the caller's thread.
        note: called with words on what happens.
    """

    def __init__(
        self,
        client: KubeClient,
        target: Target,
        options: FollowOptions,
        write: Callable[[MemberPodLog, bytes], None],
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._target = target
        self._options = options
        self._write = write
        self._note = note
        self._waiting: queue.Queue[tuple[MemberPodLog | None, bytes]] = queue.Queue(_MAX_WAITING)
        self._readers: dict[str, tuple[PodLog, Future[None]]] = {}
        self._phases = PhaseObserver(target, note)
        self._trouble = ""
        self._last_pods: dict[str, MemberPodLog] = {}

    def run(self, *, deadline: float | None = None) -> str:
        """Follow until the job has ended and all that it wrote is written, or the resource is gone.

        Args:
            deadline: monotonic time at which to return in any case; None for none.

        Returns:
            The last phase, or empty at the deadline.

        Raises:
            AccessDeniedError: a log may not be read.
        """
        phase = ""
        try:
            while deadline is None or time.monotonic() < deadline:
                phase = self._look()
                if phase in FINAL_PHASES:
                    self._drain(_DRAIN_S)
                    self._raise_readers_errors()
                    return phase
                self._write_for(_LOOK_S)
            return ""
        finally:
            for reader, _ in self._readers.values():
                reader.stop()

    def _look(self) -> str:
        """Begin to follow pods that have started, and return the phase."""
        self._raise_readers_errors()
        target = self._target
        try:
            found = self._client.get(target.type, target.name)
            pods = sort_pods(list_pods(self._client, target), self._options.role, self._options.index)
        except KubernetesError as exc:
            if not self._trouble:
                self._note(f"{exc}; trying again")
            self._trouble = str(exc)
            return ""
        if self._trouble:
            self._note("the API server answers again")
            self._trouble = ""
        present = {item.uid for item in pods}
        for uid, (reader, _) in self._readers.items():
            if uid not in present:
                reader.stop()
        for item in pods:
            if item.started and item.uid not in self._readers:
                self._announce(item)
                reader = PodLog(self._client, item, self._options.tail_lines, self._put, partial(self._put_note))
                self._readers[item.uid] = reader, start_call(f"edl-log-{item.member}", reader.run)
        for item in select_present(pods):
            if not item.started and item.uid not in self._last_pods:
                self._last_pods[item.uid] = item
                self._note(f"{item.member}: pod {item.pod} has not started yet ({item.detail})")
        return self._phases.check(found)

    def _raise_readers_errors(self) -> None:
        """Raise what ended a reader: it knows of what passes, and trying again would not help against the rest."""
        for _, future in self._readers.values():
            if future.done():
                future.result()

    def _announce(self, item: MemberPodLog) -> None:
        if any(reader.pod.member == item.member for reader, _ in self._readers.values()):
            self._note(f"{item.member}: goes on in pod {item.pod}")

    def _put(self, pod: MemberPodLog | None, line: bytes) -> None:
        self._waiting.put((pod, line))

    def _put_note(self, words: str) -> None:
        self._waiting.put((None, words.encode()))

    def _write_for(self, seconds: float) -> None:
        """Write what comes, for so long."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            try:
                self._write_line(*self._waiting.get(timeout=left_s))
            except queue.Empty:
                return

    def _write_line(self, pod: MemberPodLog | None, line: bytes) -> None:
        if pod is None:
            self._note(line.decode(errors="replace"))
        else:
            self._write(pod, line)

    def _drain(self, timeout_s: float) -> None:
        """Write what the readers still have, and say so where that takes too long."""
        end = time.monotonic() + timeout_s
        while True:
            open_members = sorted(reader.pod.member for reader, future in self._readers.values() if not future.done())
            left_s = end - time.monotonic()
            if open_members and left_s <= 0:
                words = "the rest of their logs is not waited for, and `edl logs` shows it"
                self._note(f"{', '.join(open_members)} may write on: {words}")
                return
            try:
                # When all readers are done, what waits is all there is.
                self._write_line(*self._waiting.get(timeout=min(0.1, left_s) if open_members else 0.0))
            except queue.Empty:
                if not open_members:
                    return
