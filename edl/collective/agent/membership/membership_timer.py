"""Since when an agent has seen the job's records as they are: what `world.next_world` wants to know besides them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edl.collective.job_records import Node, World

__all__ = ["MembershipTimer", "is_join_deferred"]


class MembershipTimer:
    """Remembers the nodes that were seen last, and the wish to pause. Without a clock: `now_s` is the caller's."""

    def __init__(self, now_s: float) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._nodes_at = now_s
        self._pause: tuple[int, int | None] = (-1, None)
        self._pause_at = now_s

    def record_membership(self, world: World, nodes: Iterable[str], now_s: float, *, deferred: bool = False) -> None:
        """The records were read.

        Args:
            deferred: a member does something long between two steps, so that the wait for a pause does not count.
        """
        nodes = frozenset(nodes)
        if nodes != self._nodes:
            self._nodes, self._nodes_at = nodes, now_s
        pause = (world.generation, world.pause_at)
        if pause != self._pause or deferred:
            self._pause, self._pause_at = pause, now_s

    def quiet_s(self, now_s: float) -> float:
        """For how long no node has come or gone."""
        return now_s - self._nodes_at

    @property
    def pausing(self) -> bool:
        """Whether the job's workers are to pause."""
        return self._pause[1] is not None

    def pausing_s(self, now_s: float) -> float:
        """For how long they have been asked to, 0 if they are not."""
        return now_s - self._pause_at if self.pausing else 0.0


def is_join_deferred(world: World, nodes: Mapping[str, Node]) -> bool:
    """Return whether who wants to join waits for a member that is busy, with an evaluation, say.

    Who leaves cannot wait: a host is preempted within seconds.
    """
    members = [nodes[one.id] for one in world.nodes if one.id in nodes]
    return any(node.busy == world.generation for node in members) and not any(node.leaving for node in members)
