"""The status pages of all workers of a node: read and written together, when workers can pause, the heartbeat.

An agent that was stopped for a while may have lost its place in the job without knowing it. Its threads go on in any
order, so the heartbeat, which says that the job is still this node's to go on with, is not given again before the
records have been looked at.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection
from typing import Final

from edl.background import BackgroundLoop
from edl.collective.agent.host_folder import HostFolder
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage

__all__ = ["Heartbeat", "NodeStatusPages", "pause_needs_s", "pause_step"]


_NOTICE_S: Final = 1.0
"""So far ahead is the step after which workers pause. Agents of other nodes learn of it by a watch, or within the
second after which they read the records anyway: with less, a worker may have passed the step. Training goes on."""
_MIN_STEPS: Final = 2
"""A worker may be in the step after its last reported one already."""
_PATIENCE_STEPS: Final = 6
"""So many usual steps may pass until all workers have paused, of which two are ahead of the pause as a rule: fewer
would cut off a step that takes longer than most, more would make nodes that join wait for a rank that hangs."""


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """Return a step so far ahead that all workers see the request before they finish it.

    Returns:
        The step; None if a worker reports no steps, or is not in this generation yet.
    """
    if any(status.step < 0 or status.generation != generation for status in statuses):
        return None
    step_s = _usual_step_s(statuses)
    ahead = math.ceil(_NOTICE_S / max(step_s if step_s is not None else _NOTICE_S, 1e-6))
    return max(status.step for status in statuses) + max(_MIN_STEPS, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """Return how many seconds the steps until a pause may take, where steps are long; 0 if no step was measured."""
    step_s = _usual_step_s(statuses)
    return _PATIENCE_STEPS * step_s if step_s is not None else 0.0


def _usual_step_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [duration_s for status in statuses for duration_s in status.durations_s]
    return statistics.median(durations) if durations else None


# --- The sign of life that an agent gives its workers ---


_INTERVAL_S: Final = 0.2
"""Between two beats: several fit into a lease (1.5 s unless set otherwise), so a beat that is late stops no worker."""


class Heartbeat:
    """Beats from now until `close`, as long as it may; also while the agent waits for the store.

    Args:
        stopped_s: after that many seconds without a turn of its thread this process counts as having been stopped.
        beat: gives the sign, which is of the moment it is called with (`time.monotonic()`): a process that is stopped
            in the middle of a turn gives an old one when it goes on.
        touch: called as often, also when the sign may not be given.
        wake: called when this process was stopped, so that the records are looked at.
        clock: `time.monotonic`.
    """

    def __init__(
        self,
        stopped_s: float,
        beat: Callable[[float], object],
        touch: Callable[[], object],
        wake: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopped_s = max(stopped_s, 2 * _INTERVAL_S)
        self._beat = beat
        self._touch = touch
        self._wake = wake
        self._clock = clock
        self._allowed = (-math.inf, -math.inf)
        self._resumed_at = clock()
        self._turn_at = self._resumed_at
        self._loop = BackgroundLoop("edl-heartbeat", self._turn)

    def allow_beats(self, asked_at: float, until: float) -> None:
        """Allow beats, since the job's records have the workers go on.

        Args:
            asked_at: when the records were asked for (`time.monotonic()`).
            until: when beats end if nothing more is heard of the records (`time.monotonic()`).
        """
        self._allowed = asked_at, until

    def close(self) -> None:
        """End the beats."""
        self._loop.close()

    def _turn(self) -> float:
        now = self._clock()
        if now - self._turn_at > self._stopped_s:
            self._resumed_at = now
            self._wake()
        self._turn_at = now
        self._touch()
        asked_at, until = self._allowed
        if asked_at >= self._resumed_at and now < until:
            self._beat(now)
        return _INTERVAL_S


# --- The status pages of all workers of a node, read and written together ---


class NodeStatusPages:
    """The workers' pages of shared memory, from now until the host's folder is removed."""

    def __init__(self, host: HostFolder, workers: int) -> None:
        self._pages = {rank: WorkerStatusPage.create(host.status_page(rank)) for rank in range(workers)}

    def read_statuses(self) -> dict[int, WorkerStatus]:
        """Return what the pages say, by local rank."""
        return {rank: page.read_status() for rank, page in self._pages.items()}

    def record_agent_heartbeat(self, at: float) -> None:
        """Show the workers that their agent lived at this moment (`time.monotonic()`)."""
        for page in self._pages.values():
            page.record_agent_heartbeat(at)

    def request_pause(self, step: int | None) -> None:
        """Ask all workers to pause after `step`; None takes it back."""
        for page in self._pages.values():
            page.request_pause(step)

    def have_paused(self, generation: int) -> bool:
        """Return whether all workers have paused in a generation."""
        statuses = self.read_statuses().values()
        return all(status.paused >= 0 and status.generation == generation for status in statuses)

    def report_steps(self, generation: int) -> bool:
        """Return whether any worker has said in a generation which step it has finished."""
        statuses = self.read_statuses().values()
        return any(status.step >= 0 and status.generation == generation for status in statuses)

    def choose_pause_step(self, generation: int) -> int | None:
        """Return a step that no worker has finished and that all can still be told of; None if they report no steps."""
        return pause_step(self.read_statuses().values(), generation)

    def pause_needs_s(self) -> float:
        """Return how many seconds the steps until a pause may take, where steps are long."""
        return pause_needs_s(self.read_statuses().values())

    @property
    def last_step(self) -> int:
        """The last step that any worker finished, -1 if they report none."""
        return max(status.step for status in self.read_statuses().values())
