"""The log of a pod, followed to its end: a connection that breaks is made again, and no line comes twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from edl.backoff import Backoff
from edl.cli.kube.member_logs.lines import LineCutter
from edl.cli.kube.member_logs.selection import MemberPodLog, read_pod
from edl.errors import ClosedError, InvalidObjectError, KubernetesError
from edl.kube.client import KubeClient
from edl.kube.resource_types import PODS

__all__ = ["PodLog"]

_CONNECTION_S: Final = 30.0
"""Of a connection: the log of a node that has gone is silent, and stays open until it is looked whether it is there."""
_SHORT_S: Final = 1.0
"""Of a connection without a new line: shorter ones are a container's that waits to be restarted, whose last log the
kubelet sends at once."""


class PodLog:
    """Follows the log of a pod; `run` is for a thread of its own.

    Args:
        client: of the cluster.
        pod: whose log.
        tail_lines: of what was written before; None for all.
        write: called with each line, in `run`'s thread.
        note: called with words on what is wrong.
    """

    def __init__(
        self,
        client: KubeClient,
        pod: MemberPodLog,
        tail_lines: int | None,
        write: Callable[[MemberPodLog, bytes], None],
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self.pod = pod
        self._tail_lines = tail_lines
        self._write = write
        self._note = note
        self._lines = LineCutter()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Read no more, as soon as the connection lets go."""
        self._stopping.set()

    def run(self) -> None:
        """Follow, until the container has ended, the pod is gone, or `stop`."""
        backoff = Backoff(0.2, 5.0, jitter=0.3)
        trouble = ""
        while not self._stopping.is_set():
            try:
                began = time.monotonic()
                lines = self._read()
                if self._is_over():
                    # What came between the connection's end and the container's.
                    self._read()
                    return
                trouble = ""
                if lines or time.monotonic() - began >= _SHORT_S:
                    backoff.reset()
                else:
                    self._stopping.wait(backoff.next_wait_s())
            except (KubernetesError, InvalidObjectError) as exc:
                if isinstance(exc, InvalidObjectError) and self._is_over():
                    return
                if str(exc) != trouble:
                    trouble = str(exc)
                    self._note(f"{self.pod.member}: {trouble}; trying again")
                self._stopping.wait(backoff.next_wait_s())
            except ClosedError:
                return

    def _read(self) -> int:
        """Read until the connection ends; return how many lines were new."""
        count = 0
        self._lines.restart()
        since = self._lines.since
        pieces = self._client.read_log(
            self.pod.pod,
            container=self.pod.container,
            follow=True,
            tail_lines=None if since else self._tail_lines,
            since_time=since,
            timestamps=True,
            deadline_s=_CONNECTION_S,
        )
        for piece in pieces:
            for line in self._lines.cut(piece):
                self._write(self.pod, line)
                count += 1
            if self._stopping.is_set():
                break
        # A line without an end at a connection's end may be half a line: it comes again from `since` on.
        return count

    def _is_over(self) -> bool:
        """Whether the container has written its last."""
        try:
            found = self._client.get(PODS, self.pod.pod)
        except KubernetesError:
            return False
        now = read_pod(found) if found is not None else None
        return now is None or now.uid != self.pod.uid or now.ended
