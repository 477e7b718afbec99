"""The rows of the soak as a torch data set. Apart, so that other students need not import torch."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset

from tests.soak.data import Array, Service, rows_of

__all__ = ["NumberedRows"]


class NumberedRows(Dataset[tuple[Array, int]]):
    """Rows 0 to `count`, each with its number."""

    def __init__(self, service: Service, count: int) -> None:
        self._service, self._count = service, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Array, int]:
        return rows_of(self._service, np.array([number]))[0], number
