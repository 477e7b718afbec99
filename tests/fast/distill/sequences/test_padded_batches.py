"""Batches as collators for language models make them: labels stand in the places of their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edl.distill.torch import distill  # noqa: E402
from edl.errors import SettingsError, SourceError  # noqa: E402
from tests.fast.distill.conftest import Served  # noqa: E402
from tests.fast.distill.sequences.language_model import (  # noqa: E402
    VOCABULARY,
    check_batch,
    check_labels,
    sequences,
)

PAD = 99_999


def collated(texts: list[np.ndarray], side: str = "right") -> dict[str, Any]:
    length = max(map(len, texts))
    ids = np.full((len(texts), length), PAD, np.int64)
    mask = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(length - len(text), length)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


ASKED: dict[str, Any] = {"inputs": {"ids": "input_ids"}, "outputs": "logprobs", "tokens": "attention_mask", "top_k": 4}
PAIR: dict[str, Any] = {"inputs": {"ids": 0}, "outputs": "logprobs", "tokens": 1, "top_k": 4}


@pytest.mark.parametrize(("side", "batch_rows"), [("left", None), ("left", 50), ("right", 50)])
def test_labels_stand_at_their_tokens(model: Served, side: str, batch_rows: int | None) -> None:
    texts = sequences(60)
    data = [collated(texts[at : at + 8], side) for at in range(0, 60, 8)]
    with distill(data, model.endpoint, batch_rows=batch_rows, tokenizer="sha256:ab", **ASKED) as loader:
        for _ in range(2):
            delivered = list(loader)
            for (batch, labels), expected in zip(delivered, data, strict=True):
                assert batch is expected
                check_batch(batch["input_ids"], batch["attention_mask"], labels)


def test_packed_rows_bring_their_positions(model: Served) -> None:
    """A row of several texts gets the labels of each; their numbers in the mask are refused."""
    ids = torch.tensor([[5, 6, 7, 5, 6, PAD]])
    numbers, positions = torch.tensor([[1, 1, 1, 2, 2, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    packed = (ids, positions, numbers != 0)
    asked = {**PAIR, "inputs": {"ids": 0, "position": 1}, "tokens": 2}
    with distill([packed], model.endpoint, **asked) as loader:
        ((_, labels),) = list(loader)
    for part, text in ((slice(3), [5, 6, 7]), (slice(3, 5), [5, 6])):
        check_labels(text, labels.map(lambda array, part=part: array[0, part].numpy()))
    loader = distill([(ids, numbers)], model.endpoint, **PAIR)
    with loader, pytest.raises(SourceError, match="its mask contains 2"):
        list(loader)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2)), r"batch 0: its mask has shape \[2\]"),
        ((torch.ones(2, 3), torch.ones(2, 4)), r"input 'ids' has shape \[2, 3\], its mask \[2, 4\]"),
        ((torch.ones(1, 600).long(), torch.ones(1, 600)), "batch 0, sequence 0 is a sequence of 600 tokens, .* 200"),
        ((torch.ones(2, 3),), "batch 0 of the source has no field for input 'tokens'"),
    ],
)
def test_odd_batches_are_refused(model: Served, batch: Any, words: str) -> None:
    loader = distill([batch], model.endpoint, **PAIR)
    with loader, pytest.raises(SourceError, match=words):
        list(loader)


def test_single_rows_of_a_text_are_refused(model: Served) -> None:
    """A batch of single rows would be answered as if each were a text of one token."""
    loader = distill([(torch.ones(4).int(),)], model.endpoint, inputs=["ids"], outputs="logprobs", top_k=3)
    with loader, pytest.raises(SourceError, match=r"belong to sequences.*set_sequence_generator.*tokens="):
        list(loader)
    with pytest.raises(SettingsError, match="neither a tokenizer's file"):
        distill([], "127.0.0.1:1", tokenizer="no/such/folder", **PAIR)


def test_a_text_may_be_empty(model: Served) -> None:
    """A mask may have holes, too; a batch in which no text has a token is refused."""
    some = (torch.tensor([[5, PAD, 6], [PAD] * 3]), torch.tensor([[1, 0, 1], [0, 0, 0]]))
    none = (torch.full((2, 3), PAD), torch.zeros(2, 3))
    with distill([some], model.endpoint, **PAIR) as loader:
        (((ids, mask), labels),) = loader
    check_batch(ids, mask, labels)
    assert (labels.ids.dtype, labels.values.dtype, labels.classes) == (torch.int32, torch.float32, VOCABULARY)
    with distill([none], model.endpoint, **PAIR) as loader, pytest.raises(SourceError, match="batch 0 is a batch with"):
        list(loader)
