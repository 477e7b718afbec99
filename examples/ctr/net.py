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
"""Categorical columns, and how many values each has."""
NUMBERS = ("age", "price", "history")


class ShardedTable(nn.Module):
    """Rows of numbers, of which each worker holds an equal range, trained by Adagrad (Duchi et al. 2011).

    Workers look up different ids, so all must call `forward` and `update` equally often, if need be with no ids. Both
    send only the distinct rows that a worker asks for, to and from the worker that holds them.

    The rows are a `DTensor`, so that `Checkpointer` saves each worker's range, and loads it into any number of ranges.

    Args:
        rows: Initial values [rows, columns], the same on all workers.
        mesh: All workers.
    """

    def __init__(self, rows: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        size = mesh.size()
        self._range = -(-len(rows) // size)  # as DTensor cuts
        self._begin = mesh.get_rank() * self._range
        self._counts = [0] * size, [0] * size
        for name, value in (("weight", rows), ("squares", torch.zeros_like(rows))):
            self.register_buffer(name, distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up rows: ids [...] to [..., columns]."""
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
        rows, where = self._wanted.unique(return_inverse=True)  # several workers may have asked for a row
        grad = grads.new_zeros(len(rows), grads.shape[1]).index_add_(0, where, grads)
        weight, squares = self.weight.to_local(), self.squares.to_local()
        squares[rows] += grad.square()
        weight[rows] -= rate * grad / (squares[rows].sqrt() + 1e-10)

    def _send(self, parts: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send each worker its number of rows of `parts`; return what the others sent."""
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
        rows = 0.01 * torch.randn(self._total, 1 + width)  # whole on each worker: draw a huge table in parts instead
        rows[:, 0] = 0
        self.table = ShardedTable(rows, mesh)
        self.deep = nn.Sequential(
            *(nn.Linear(len(FIELDS) * width + len(NUMBERS), 128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)),
        )

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return logits [rows] for ids [rows, fields] and numbers [rows, numbers]."""
        # A prime spreads each field over all workers: otherwise the one that holds the users would have the most work.
        found = self.table((self.begins + ids) * 1_000_003 % self._total)
        wide = found[..., 0].sum(1)
        return wide + self.deep(torch.cat([found[..., 1:].flatten(1), numbers], 1)).squeeze(1)


def area_under_curve(logits: Tensor, clicks: Tensor) -> float:
    """Return the area under the ROC curve: how often a click has a higher logit than a row without (Mann-Whitney)."""
    ranks, clicked = logits.argsort().argsort() + 1, clicks == 1
    count = int(clicked.sum())
    return (int(ranks[clicked].sum()) - count * (count + 1) / 2) / (count * (len(clicks) - count))
