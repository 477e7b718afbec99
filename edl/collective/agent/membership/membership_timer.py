"""For how long an agent has seen the job's records as they are: what `rendezvous.next_world` needs besides them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edl.collective.job_records import Node, World

__all__ = ["MembershipTimer", "is_join_deferred"]


class MembershipTimer:
    """Measures for how long the nodes, and the job's wish to pause, have been the same. Reads no clock.

    Args:
        now_s: the time now, in seconds of the clock that all calls use.
    """

    def __init__(self, now_s: float) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._nodes_at = now_s
        self._pause: tuple[int, int | None] = (-1, None)
        self._pause_at = now_s

    def record_membership(self, world: World, nodes: Iterable[str], now_s: float, *, deferred: bool = False) -> None:
        """Record what was read from the Store.

        Args:
            world: the job's record.
            nodes: ids of the live nodes.
            now_s: the time of reading, in seconds.
            deferred: a member does something long between two steps, so that the wait for a pause does not count.
        """
        nodes = frozenset(nodes)
        if nodes != self._nodes:
            self._nodes = nodes
            self._nodes_at = now_s
        pause = (world.generation, world.pause_at)
        if pause != self._pause or deferred:
            self._pause = pause
            self._pause_at = now_s

    def quiet_s(self, now_s: float) -> float:
        """Return for how many seconds no node has come or gone."""
        return now_s - self._nodes_at

    @property
    def pausing(self) -> bool:
        """Whether the job's workers are to pause."""
        return self._pause[1] is not None

    def pausing_s(self, now_s: float) -> float:
        """Return for how many seconds the workers have been asked to pause, 0 if they are not."""
        return now_s - self._pause_at if self.pausing else 0.0


def is_join_deferred(world: World, nodes: Mapping[str, Node]) -> bool:
    """Return whether nodes that want to join wait for a member that is busy, with an evaluation, say.

    A node that leaves cannot wait: a host is preempted within seconds.

    Args:
        world: the job's record.
        nodes: records of the live nodes, by id.
    """
    members = [nodes[member.id] for member in world.nodes if member.id in nodes]
    return any(node.busy == world.generation for node in members) and not any(node.leaving for node in members)
