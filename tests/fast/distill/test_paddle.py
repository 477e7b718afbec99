"""`distill` around a real `paddle.io.DataLoader`, with real teacher processes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # paddle's own
    paddle = pytest.importorskip("paddle")

from edl.distill import Options
from edl.distill.paddle import distill
from tests.fast.distill.conftest import Serve

WIDTH = 4


class Numbers(paddle.io.Dataset):  # type: ignore[misc,name-defined]
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(WIDTH, index, np.float32), index


@pytest.mark.filterwarnings("ignore")
def test_batches_have_labels_as_tensors(serve: Serve) -> None:
    """Every batch comes with its labels as tensors."""
    data = paddle.io.DataLoader(Numbers(), batch_size=8, shuffle=True)
    teacher, options = serve("echo"), Options(teacher_timeout_s=60)
    with distill(data, teacher.endpoint, inputs=["x", None], outputs="y", options=options) as loader:
        assert len(loader) == 7
        for _ in range(2):
            seen: list[int] = []
            for (x, numbers), soft in loader:
                assert isinstance(soft, paddle.Tensor)
                assert (soft[:, 0].numpy() == numbers.numpy()).all()
                assert (x[:, 0].numpy() == numbers.numpy()).all()
                seen += numbers.tolist()
            assert sorted(seen) == list(range(50))
