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
from edl.testing.models import prefix_scores_of
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_of_padded_batches(serve: Serve, side: str) -> None:
    """Labels stand in the places of their tokens, and a student's loss over them has a gradient there alone."""
    from edl.distill.paddle_losses import token_loss

    data = [_collated(texts, side) for texts in ([[5, 3, 9], [7]], [[1, 2], [], [4, 4, 4, 4]])]
    teacher = serve("prefix_scores", vocabulary=16)
    settings: dict[str, Any] = {"inputs": {"ids": "input_ids"}, "outputs": "logprobs", "tokens": "attention_mask"}
    with distill(data, teacher.endpoint, top_k=3, options=Options(teacher_timeout_s=60), **settings) as loader:
        delivered = list(loader)
    assert [batch for batch, _ in delivered] == data
    for batch, labels in delivered:
        mask = batch["attention_mask"].numpy()
        assert list(labels.ids.shape) == [*mask.shape, 3]
        for row, kept in enumerate(mask.astype(bool)):
            whole = prefix_scores_of(batch["input_ids"].numpy()[row][kept], 16)
            assert labels.values.numpy()[row][kept].tolist() == (-np.sort(-whole, axis=-1)[:, :3]).tolist()
            assert not labels.values.numpy()[row][~kept].any()
        student = paddle.zeros([*mask.shape, 16])
        student.stop_gradient = False
        token_loss(student, labels, mask=batch["attention_mask"]).backward()
        assert (np.abs(student.grad.numpy()).sum(-1) > 0).tolist() == mask.astype(bool).tolist()


def _collated(texts: list[list[int]], side: str) -> dict[str, Any]:
    length = max(map(len, texts))
    ids, mask = np.full((len(texts), length), 99_999), np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(length - len(text), length)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": paddle.to_tensor(ids), "attention_mask": paddle.to_tensor(mask)}
