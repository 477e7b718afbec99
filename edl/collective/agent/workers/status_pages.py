"""The status pages of all workers of a node, read and written together."""

from __future__ import annotations

from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.membership import pause
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage

__all__ = ["NodeStatusPages"]


class NodeStatusPages:
    """The workers' pages of shared memory, from now until the host's folder is removed.

    Args:
        host: the node's folder in memory.
        workers: how many this node runs.
    """

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
        return pause.pause_step(self.read_statuses().values(), generation)

    def pause_needs_s(self) -> float:
        """Return how many seconds the steps until a pause may take, where steps are long."""
        return pause.pause_needs_s(self.read_statuses().values())

    @property
    def last_step(self) -> int:
        """The last step that any worker finished, -1 if they report none."""
        return max(status.step for status in self.read_statuses().values())
