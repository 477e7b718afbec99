"""A wide-and-deep model (Cheng et al. 2016) whose embeddings are rows of one table, sharded over the workers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

FIELDS = {
    "user": 20_000,
    "advertisement": 5_000,
    "page": 2_000,
    "advertiser": 500,
    "city": 200,
    "device": 50,
    "hour": 24,
    "position": 10,
}
"""Categorical columns, and the number of values in each."""
NUMBERS = ("age", "price", "history")


class ShardedTable(nn.Module):
    """A table of numbers, trained with Adagrad (Duchi et al. 2011). Each worker holds an equal range of its rows.

    Workers look up different ids, so all of them must call `forward` and `update` equally often, with no ids if
    necessary. Each worker exchanges only the distinct rows that it asks for with the workers that hold them.

    The rows are a `DTensor`, so `Checkpointer` saves each worker's range and can restore the table to any number of
    workers.

    Args:
        rows: Initial values [rows, columns], the same on all workers.
        mesh: All workers.
    """

    def __init__(self, rows: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        size = mesh.size()
        self._range = -(-len(rows) // size)  # the size of DTensor's shards
        self._begin = mesh.get_rank() * self._range
        self._counts = [0] * size, [0] * size
        for name, value in (("weight", rows), ("squares", torch.zeros_like(rows))):
            self.register_buffer(name, distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., columns] of ids [...]."""
        distinct, where = ids.unique(return_inverse=True)  # sorted: the ids of a worker's range are together
        asked = torch.bincount(distinct // self._range, minlength=len(self._counts[0]))
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked)
        self._counts = asked.tolist(), wanted.tolist()
        self._wanted = self._send(distinct, *self._counts) - self._begin
        self._rows = self._send(self.weight.to_local()[self._wanted], *reversed(self._counts)).requires_grad_()
        return nn.functional.embedding(where, self._rows)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Apply the sum of all workers' gradients to the rows that were looked up last."""
        assert self._rows.grad is not None
        grads = self._send(self._rows.grad, *self._counts)
        rows, where = self._wanted.unique(return_inverse=True)  # several workers may have asked for the same row
        grad = grads.new_zeros(len(rows), grads.shape[1]).index_add_(0, where, grads)
        weight, squares = self.weight.to_local(), self.squares.to_local()
        squares[rows] += grad.square()
        weight[rows] -= rate * grad / (squares[rows].sqrt() + 1e-10)

    def _send(self, parts: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send each worker its share of the rows in `parts`, and return what the others sent."""
        found = parts.new_empty(sum(received), *parts.shape[1:])
        dist.all_to_all_single(found, parts, received, sent)
        return found


class WideDeep(nn.Module):
    """Predict clicks. The first column of the table is a value's weight in the wide part, the others its embedding."""

    def __init__(self, mesh: DeviceMesh, width: int = 16) -> None:
        super().__init__()
        sizes = torch.tensor(list(FIELDS.values()))
        self.register_buffer("begins", sizes.cumsum(0) - sizes, persistent=False)
        self._total = int(sizes.sum())
        rows = 0.01 * torch.randn(self._total, 1 + width)  # the whole table on each worker: draw a huge one in parts
        rows[:, 0] = 0
        self.table = ShardedTable(rows, mesh)
        self.deep = nn.Sequential(
            *(nn.Linear(len(FIELDS) * width + len(NUMBERS), 128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)),
        )

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return logits [rows] for ids [rows, fields] and numbers [rows, numbers]."""
        # The prime spreads each field over all workers. Otherwise the worker that holds the users would have most work.
        found = self.table((self.begins + ids) * 1_000_003 % self._total)
        wide = found[..., 0].sum(1)
        return wide + self.deep(torch.cat([found[..., 1:].flatten(1), numbers], 1)).squeeze(1)


def area_under_curve(logits: Tensor, clicks: Tensor) -> float:
    """Return the area under the ROC curve: how often a clicked row has a higher logit than another (Mann-Whitney)."""
    ranks, clicked = logits.argsort().argsort() + 1, clicks == 1
    count = int(clicked.sum())
    return (int(ranks[clicked].sum()) - count * (count + 1) / 2) / (count * (len(clicks) - count))
