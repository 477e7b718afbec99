"""The `ctr` benchmark's plain side: the model of examples/ctr with PyTorch's sparse embedding. Runs as a `Child`."""

from __future__ import annotations

import time

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from benchmarks._child import answer


def measure(data: str, batch: int, rows: int) -> dict[str, list[float]]:
    """Train one epoch.

    Args:
        data: Path of the table.
        batch: Rows per step.
        rows: Number of rows over which each rate is measured.
    """
    from net import FIELDS, NUMBERS  # type: ignore[import-not-found] # examples/ctr

    table = pq.read_table(data)
    ids, numbers, clicks = (
        torch.tensor(np.stack([table[name] for name in names], 1)) for names in (FIELDS, NUMBERS, ["click"])
    )
    sizes = torch.tensor(list(FIELDS.values()))
    ids += sizes.cumsum(0) - sizes
    embedding = nn.Embedding(int(sizes.sum()), 17, sparse=True)
    deep = nn.Sequential(
        *(nn.Linear(len(FIELDS) * 16 + len(NUMBERS), 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)),
    )
    optimizer = torch.optim.Adagrad([*embedding.parameters(), *deep.parameters()], lr=0.05)
    rates = []
    for begin in range(0, len(ids), rows):
        began = time.perf_counter()
        for at in range(begin, begin + rows, batch):
            part = slice(at, at + batch)
            found = embedding(ids[part])
            inputs = torch.cat([found[..., 1:].flatten(1), numbers[part]], 1)
            logits = found[..., 0].sum(1, keepdim=True) + deep(inputs)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks[part])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        rates.append(rows / (time.perf_counter() - began))
    return {"rates": rates}


if __name__ == "__main__":
    answer(lambda request: measure(**request))
