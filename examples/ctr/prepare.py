"""Write made-up clicks on advertisements, train.parquet and test.parquet, always the same: python prepare.py [ROWS]"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from net import FIELDS, NUMBERS, area_under_curve


def main(rows: int) -> None:
    random = np.random.default_rng(0)
    tests = max(rows // 10, 2_000)
    logits = np.full(rows + tests, -1.5)
    columns: dict[str, np.ndarray] = {}
    tastes = []
    for name, size in FIELDS.items():
        # A few values are frequent and most are rare. An id says nothing about how frequent it is.
        ids = random.permutation(size)[(size * random.random(rows + tests) ** 4).astype(np.int64)]
        columns[name] = ids
        logits += 0.4 * random.normal(size=size)[ids]
        tastes.append(random.normal(size=(size, 3))[ids])
    logits += 0.6 * (tastes[0] * tastes[1]).sum(1)  # users like some advertisements: the deep part learns this
    for name in NUMBERS:
        columns[name] = random.normal(size=rows + tests).astype(np.float32)
        logits += 0.3 * columns[name]
    clicks = (random.random(rows + tests) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    table = pa.table({**columns, "click": clicks})
    pq.write_table(table.slice(0, rows), "train.parquet", row_group_size=8192)
    pq.write_table(table.slice(rows), "test.parquet", row_group_size=8192)
    best = area_under_curve(torch.from_numpy(logits[rows:]), torch.from_numpy(clicks[rows:]))
    print(f"{rows:,} and {tests:,} rows, {clicks.mean():.1%} clicked; a model can reach AUC {best:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400_000)
