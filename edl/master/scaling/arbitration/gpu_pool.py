"""The nodes of a cluster, their free GPUs in buckets, and where each job's workers are; steps can be undone."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

__all__ = ["GpuPool"]


class GpuPool:
    """Nodes with free GPUs. Jobs and nodes are numbers here, in the order in which they were given.

    Best fit: a worker goes to a node with the fewest free GPUs that suffice, of these to the first. Nodes with equally
    many free GPUs share a bucket, so that this takes no search. A bucket is a heap from which a node is removed only
    when it comes up: its number of free GPUs tells whether it still belongs there.

    Args:
        capacities: GPUs of each node.
        gpus: that a worker of each job needs.
    """

    def __init__(self, capacities: Sequence[int], gpus: Sequence[int]) -> None:
        self.gpus = gpus
        self.free = list(capacities)
        self.on_node: list[dict[int, int]] = [{} for _ in capacities]
        self.of_job: list[dict[int, int]] = [{} for _ in gpus]
        self.workers = [0] * len(gpus)
        self.free_gpus = sum(self.free)
        self._buckets: list[list[int]] = [[] for _ in range(max(self.free, default=0) + 1)]
        for node, free in enumerate(self.free):
            self._buckets[free].append(node)  # ascending, so a heap already
        self._log: list[tuple[int, int, int]] = []

    def add_workers(self, job: int, node: int, count: int = 1) -> None:
        """Put workers on a node.

        Args:
            job: whose.
            node: where; its free GPUs may fall below 0 here, which `arbitrate` mends before anything else.
            count: how many, 1 or more.
        """
        self._change(job, node, count)

    def remove_worker(self, job: int, node: int) -> None:
        """Take a worker from a node.

        Args:
            job: whose.
            node: where it has a worker.
        """
        self._change(job, node, -1)

    def find_node(self, gpus: int) -> int | None:
        """Return the node with the fewest free GPUs that suffice; None if there is none.

        Args:
            gpus: how many are needed, on one node.
        """
        for count in range(gpus, len(self._buckets)):
            bucket = self._buckets[count]
            while bucket:
                if self.free[bucket[0]] == count:
                    return bucket[0]
                heapq.heappop(bucket)
        return None

    def mark(self) -> int:
        """Return where the log of changes stands, for `undo_to`."""
        return len(self._log)

    def undo_to(self, mark: int) -> None:
        """Undo all changes since a mark.

        Args:
            mark: of `mark`.
        """
        while len(self._log) > mark:
            job, node, by = self._log.pop()
            self._change(job, node, -by)
            self._log.pop()

    def describe_placement(self, job: int, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many workers of a job are on which node, by the nodes' names.

        Args:
            job: whose.
            names: of the nodes.
        """
        return {names[node]: count for node, count in sorted(self.of_job[job].items())}

    def _change(self, job: int, node: int, by: int) -> None:
        for counts, key in ((self.of_job[job], node), (self.on_node[node], job)):
            count = counts.get(key, 0) + by
            if count:
                counts[key] = count
            else:
                del counts[key]
        self.workers[job] += by
        free = self.free[node] - by * self.gpus[job]
        self.free[node] = free
        self.free_gpus -= by * self.gpus[job]
        if free >= 0:
            heapq.heappush(self._buckets[free], node)
        self._log.append((job, node, by))
