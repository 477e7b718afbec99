"""Batches as collators for language models make them get labels in the places of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edl.distill.compress import TopK  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.errors import SettingsError, SourceError  # noqa: E402
from edl_serving import TensorSpec  # noqa: E402
from tests.fast.distill.conftest import until  # noqa: E402
from tests.fast.distill.sequences.corpus import sequences  # noqa: E402
from tests.fast.distill.sequences.language_model import VOCABULARY, PrefixModel, check_labels  # noqa: E402
from tests.fast.serving.conftest import Inside  # noqa: E402

PAD = 99_999


@pytest.fixture(scope="module")
def model() -> Iterator[Inside]:
    found = Inside(PrefixModel(), max_batch_rows=512)
    yield found
    found.close()


def collated(texts: list[np.ndarray], side: str) -> dict[str, Any]:
    length = max(map(len, texts))
    ids = np.full((len(texts), length), PAD, np.int64)
    mask = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(length - len(text), length)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), "name": side}


def batches(count: int, rows: int, side: str) -> list[dict[str, Any]]:
    texts = sequences(count)
    return [collated(texts[start : start + rows], side) for start in range(0, count, rows)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_rows", [None, 50])
def test_labels_stand_at_their_tokens(model: Inside, side: str, batch_rows: int | None) -> None:
    data = batches(60, 8, side)
    loader = distill(
        data,
        model.target,
        inputs={"ids": "input_ids"},
        outputs="logprobs",
        tokens="attention_mask",
        top_k=4,
        batch_rows=batch_rows,
        tokenizer="sha256:ab",
    )
    with loader:
        for _ in range(2):
            delivered = list(loader)
            assert len(delivered) == len(data)
            for (batch, labels), expected in zip(delivered, data, strict=True):
                assert batch is expected
                assert isinstance(labels, TopK)
                mask = batch["attention_mask"].bool()
                assert labels.ids.shape == labels.values.shape == (*mask.shape, 4)
                for part in (labels.ids, labels.values, labels.tail_lse):
                    assert not part[~mask].any(), "what is padded has no label"
                for row, kept in enumerate(mask):
                    ids = batch["input_ids"][row][kept].numpy()
                    own = TopK(*(p[row][kept].numpy() for p in (labels.ids, labels.values, labels.tail_lse)))
                    check_labels(ids, own, 4)


def test_empty_sequences_and_holes(model: Inside) -> None:
    """A row of a batch without tokens has no labels; tokens that a mask leaves out are not sent."""
    ids = torch.tensor([[5, 6, PAD, 7], [PAD, PAD, PAD, PAD], [8, PAD, PAD, PAD]])
    batch = (ids, ids != PAD)
    with distill([batch], model.target, inputs=["ids", None], outputs="logprobs", tokens=1, top_k=3) as loader:
        ((_, labels),) = list(loader)
    assert not labels.values[1].any()
    check_labels([5, 6, 7], TopK(*(p[0][batch[1][0]].numpy() for p in (labels.ids, labels.values, labels.tail_lse))), 3)


def test_packed_rows_bring_their_positions(model: Inside) -> None:
    """A row of several texts gets the labels of each; their numbers in the mask are refused."""
    ids = torch.tensor([[5, 6, 7, 5, 6, PAD]])
    numbers, positions = torch.tensor([[1, 1, 1, 2, 2, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0]])
    asked: Any = {"outputs": "logprobs", "top_k": 3}
    packed = (ids, positions, numbers != 0)
    with distill([packed], model.target, inputs={"ids": 0, "position": 1}, tokens=2, **asked) as loader:
        ((_, labels),) = list(loader)
    parts = [part[0].numpy() for part in (labels.ids, labels.values, labels.tail_lse)]
    check_labels([5, 6, 7], TopK(*(part[:3] for part in parts)), 3)
    check_labels([5, 6], TopK(*(part[3:5] for part in parts)), 3)
    loader = distill([(ids, numbers)], model.target, inputs={"ids": 0}, tokens=1, **asked)
    with loader, pytest.raises(SourceError, match="its mask has 2 in it"):
        list(loader)


class UncountedModel(PrefixModel):
    """As an engine's gateway, it does not say how large the vocabulary is."""

    outputs = (TensorSpec("logprobs", "FP32", (-1,)), *PrefixModel.outputs[1:])  # type: ignore[assignment]
    top_k_outputs = frozenset({"logprobs"})  # type: ignore[assignment]


def test_a_batch_of_both_kinds_of_teacher(model: Inside) -> None:
    """Pieces of one batch come from a teacher that knows its number of classes, and from one that does not."""
    other = Inside(UncountedModel(), max_batch_rows=512)
    try:
        batch = {"ids": torch.arange(24 * 30).reshape(24, 30), "mask": torch.ones(24, 30)}
        asked: Any = {"inputs": {"ids": "ids"}, "outputs": "logprobs", "tokens": "mask", "top_k": 3, "batch_rows": 60}
        with distill([batch] * 8, [model.target, other.target], **asked) as loader:
            next(iter(loader))
            until(lambda: loader.stats().teachers_live == 2, 60)
            delivered = list(loader)
        assert len(delivered) == 8
        for _, labels in delivered:
            for row in (0, 11, 23):
                parts = [part[row].numpy() for part in (labels.ids, labels.values, labels.tail_lse)]
                check_labels(batch["ids"][row].numpy(), TopK(*parts), 3)
        assert VOCABULARY in {labels.classes for _, labels in delivered}
        assert all(server.metric("edl_teacher_requests_total", outcome="ok") for server in (model, other))
    finally:
        other.close()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2)), r"batch 0: its mask has shape \[2\]"),
        ((torch.ones(2, 3), torch.ones(2, 4)), r"input 'ids' has shape \[2, 3\], its mask \[2, 4\]"),
        ((torch.ones(2), torch.ones(2, 4)), r"input 'ids' has shape \[2\], its mask \[2, 4\]"),
        ((torch.ones(1, 600).long(), torch.ones(1, 600)), "batch 0, sequence 0 is a sequence of 600 tokens, .* 512"),
        ((torch.ones(2, 3),), "batch 0 of the source has no field for input 'tokens'"),
    ],
)
def test_odd_batches_are_refused(model: Inside, batch: Any, words: str) -> None:
    loader = distill([batch], model.target, inputs=["ids"], outputs="logprobs", tokens=1, top_k=3)
    with loader, pytest.raises(SourceError, match=words):
        list(loader)


@pytest.mark.parametrize("first", [True, False])
def test_batch_without_tokens_gets_zeros(model: Inside, first: bool) -> None:
    """A text may be empty, and so may all of a batch, also before there was any answer."""
    none = (torch.full((2, 3), PAD), torch.zeros(2, 3))
    some = (torch.tensor([[5, 6]]), torch.ones(1, 2))
    batches = [none, some, none] if first else [some, none]
    loader = distill(batches, model.target, inputs=["ids"], outputs="logprobs", tokens=1, top_k=3)
    with loader:
        delivered = list(loader)
    for (ids, mask), labels in delivered:
        assert labels.ids.shape == labels.values.shape == (*ids.shape, 3)
        assert labels.ids.dtype == torch.int32
        assert labels.values.dtype == torch.float32
        if not mask.any():
            assert not labels.ids.any()
            assert not labels.tail_lse.any()
            assert labels.classes == VOCABULARY
        else:
            check_labels([5, 6], TopK(*(part[0].numpy() for part in (labels.ids, labels.values, labels.tail_lse))), 3)


def test_input_may_be_called_tokens() -> None:
    class Renamed(PrefixModel):
        inputs = (TensorSpec("tokens", "INT32"), TensorSpec("position", "INT32"))  # type: ignore[assignment]
        outputs = PrefixModel.outputs[:1]  # type: ignore[assignment]
        optional_outputs = {}  # type: ignore[assignment]

        def predict_top_k(self, inputs: Any, k: int, temperature: float) -> Any:
            return super().predict_top_k({"ids": inputs["tokens"], **inputs}, k, temperature)

    server = Inside(Renamed(), max_batch_rows=64)
    try:
        batch = {"tokens": torch.tensor([[5, 6, PAD]]), "mask": torch.tensor([[1, 1, 0]])}
        asked: Any = {"outputs": "logprobs", "tokens": "mask", "top_k": 3}
        with distill([batch], server.target, inputs={"tokens": "tokens"}, **asked) as loader:
            ((_, labels),) = list(loader)
        check_labels([5, 6], TopK(*(part[0, :2].numpy() for part in (labels.ids, labels.values, labels.tail_lse))), 3)
    finally:
        server.close()


def test_single_rows_of_a_text_are_refused(model: Inside) -> None:
    """A batch of single rows would be answered as if each were a text of one token."""
    batch = (torch.ones(4).int(),)
    loader = distill([batch], model.target, inputs=["ids"], outputs="logprobs", top_k=3)
    with loader, pytest.raises(SourceError, match=r"belong to sequences.*set_sequence_generator.*tokens="):
        list(loader)


def test_an_odd_tokenizer_is_named_at_once() -> None:
    with pytest.raises(SettingsError, match="neither a tokenizer's file"):
        distill([], "127.0.0.1:1", inputs=["ids"], outputs="logprobs", tokens=1, tokenizer="no/such/folder")
