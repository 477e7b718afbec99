"""How far a job or pool is, as commands that wait for it see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from edl.backoff import Backoff
from edl.cli.kube.targets import Target
from edl.dashboard.state.cluster.decoding import decode_workload
from edl.dashboard.state.cluster.schema import KubernetesWorkload
from edl.errors import KubernetesError
from edl.kube.client import KubeClient
from edl.kube.objects import Object

__all__ = ["FINAL_PHASES", "PhaseObserver", "wait_for_end"]

FINAL_PHASES: Final = ("Succeeded", "Failed", "Rejected", "Deleted")
"""After which nothing more comes: of a resource that was refused, until somebody changes it."""
_TAKEN_UP_S: Final = 15.0
"""An operator looks at a new resource within a second; after so long there is probably none."""
_REFUSALS: Final = ("ObjectRefused", "AccessDenied")
"""Of the API server, in the condition Accepted. Room comes when others end (QuotaExceeded); and a job that is Pending
with a spec that cannot be worked on goes on by the spec before."""
_REFUSED_S: Final = 120.0
"""For the API server to take what it refuses: admission that is just being set up, a Role that is on its way."""


class PhaseObserver:
    """Says what a resource's phase is, and tells of changes that a person waits for.

    Args:
        target: as it was found.
        note: called with a line.
        clock: monotonic seconds.
    """

    def __init__(
        self, target: Target, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._note = note
        self._clock = clock
        self._began = clock()
        self._last = ""
        self._warned = False
        self._refusal = ""
        self._refused_since: float | None = None

    def check(self, found: Object | None) -> str:
        """Return the phase, "Deleted" where the resource is gone, or empty where no operator has taken it up.

        Args:
            found: the resource now; None where there is none.
        """
        uid = self._target.resource.get("metadata", {}).get("uid")
        if found is None or found.get("metadata", {}).get("uid") != uid:
            return "Deleted"
        item = decode_workload(self._target.kind, found)
        if not item.phase and not self._warned and self._clock() - self._began > _TAKEN_UP_S:
            self._warned = True
            self._note(f"{self._target}: no operator has taken it up yet: does `edl operator` run for this namespace?")
        phase = self._judge(item)
        if phase != self._last and phase:
            condition = item.condition("Accepted" if phase == "Rejected" else phase)
            why = (condition.message if condition is not None else "") or item.message
            self._note(f"{self._target}: {phase}{f': {why.strip()}' if why and phase != 'Running' else ''}")
            self._last = phase
        return phase

    def _judge(self, item: KubernetesWorkload) -> str:
        """Return the phase; of a resource that the API server lets have no member, for long enough, "Rejected"."""
        accepted = item.condition("Accepted")
        if accepted is None or accepted.status != "False" or item.phase in FINAL_PHASES:
            self._refusal = ""
            self._refused_since = None
            return item.phase
        if accepted.message != self._refusal:
            self._refusal = accepted.message
            self._note(f"{self._target}: {accepted.reason}: {accepted.message.strip()}")
        if item.phase != "Pending" or accepted.reason not in _REFUSALS:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = self._clock()
        elif self._clock() - self._refused_since > _REFUSED_S:
            return "Rejected"
        return item.phase


def wait_for_end(
    client: KubeClient, target: Target, note: Callable[[str], None], *, deadline: float | None = None
) -> str:
    """Wait until a job has ended.

    Args:
        client: of the cluster.
        target: the job.
        note: called with a line on each change.
        deadline: monotonic time at which to return in any case; None for none.

    Returns:
        The last phase; empty at the deadline.
    """
    observer = PhaseObserver(target, note)
    backoff = Backoff(0.5, 2.0)
    trouble = ""
    while deadline is None or time.monotonic() < deadline:
        try:
            phase = observer.check(client.get(target.type, target.name))
        except KubernetesError as exc:  # the job goes on meanwhile
            if not trouble:
                note(f"{exc}; trying again")
            trouble = str(exc)
        else:
            trouble = ""
            if phase in FINAL_PHASES:
                return phase
        left_s = float("inf") if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(backoff.next_wait_s(), left_s)))
    return ""
