"""Inputs of uncommon types, and of shapes that differ from request to request, through a teacher and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.torch import distill
from edl.errors import SettingsError
from edl.testing.models import Model
from tests.fast.distill.conftest import Serve
from tests.waiting import wait_until


def model(answer: Callable[[Any], Any], x: str, y: str) -> Model:
    """A model of one input, `x`, and one output, `y`."""
    return Model(lambda inputs: {"y": answer(inputs["x"])}, [f"x:{x}"], [f"y:{y}"])


@pytest.mark.parametrize(
    ("dtype", "shared_memory"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float64, True)],
)
def test_inputs_are_rounded_to_bfloat16(serve: Serve, dtype: torch.dtype, *, shared_memory: bool) -> None:
    """A type that numpy does not have."""
    teacher = serve(model(lambda x: x * 2, "bf16[3]", "float32[3]"))
    batches = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in (5, 1, 8)]
    options = Options(teacher_timeout_s=60, shared_memory=shared_memory)
    with distill(batches, teacher.endpoint, inputs="x", outputs="y", batch_rows=4, options=options) as labelled:
        for batch, labels in labelled:
            assert torch.equal(labels, batch.float().bfloat16().float() * 2)


# Texts padded to the longest of their batch.

CLASSES = 11


def scores(ids: Any) -> Any:
    return np.sin(ids[..., None] * 0.37 + np.arange(CLASSES, dtype="f4")).astype("f4")


PER_TOKEN = model(scores, "int32[-1]", f"float32[-1,{CLASSES}]")


def batches(*lengths: int, rows: int = 3) -> Iterator[tuple[Any, Any]]:
    for at, length in enumerate(lengths):
        numbers = np.arange(rows) + rows * at
        yield np.repeat(numbers[:, None], length, 1).astype("i4"), numbers


def reader_of(*endpoints: str, **kwargs: Any) -> DistillReader:
    return DistillReader(["x", None], ["y"], teachers=list(endpoints), **kwargs)


@pytest.mark.parametrize("rows", [None, 2])
def test_lengths_of_labels_follow_batches(serve: Serve, rows: int | None) -> None:
    lengths = [5, 8, 5, 1, 13, 8, 2] * 5
    with reader_of(serve(PER_TOKEN).endpoint, serve(PER_TOKEN).endpoint, teacher_batch_size=rows) as reader:
        reader.set_batch_generator(lambda: batches(*lengths))
        list(reader())
        wait_until(lambda: reader.stats().teachers_live == 2)
        delivered = list(reader())
        assert all(one.failures == 0 for one in reader.stats().teachers.values())
    assert [ids.shape[1] for ids, *_ in delivered] == lengths
    for ids, _, logits in delivered:
        np.testing.assert_allclose(logits, scores(ids), rtol=1e-5)


def test_cached_labels_keep_their_length(serve: Serve) -> None:
    """Labels of tokens are never of another length than the inputs; those of texts are of one shape for any length."""
    with SoftLabelCache() as cache, reader_of(serve(PER_TOKEN).endpoint, cache=cache, id_field=1) as reader:
        lengths = [5, 5]
        reader.set_batch_generator(lambda: batches(*lengths))
        for _ in range(2):
            assert [logits.shape for *_, logits in reader()] == [(3, 5, CLASSES)] * 2
        assert reader.stats().rows_cached == 6
        lengths = [8, 8]
        with pytest.raises(SettingsError, match=r"'x' has rows of shape \[8\], before it \[5\].*Pad all batches"):
            list(reader())
    per_text = serve(model(lambda ids: ids.sum(1, keepdims=True).astype("f4"), "int32[-1]", "float32[1]"))
    with SoftLabelCache() as cache, reader_of(per_text.endpoint, cache=cache, id_field=1) as reader:
        reader.set_batch_generator(lambda: batches(5, 8, 2))
        for _ in range(2):
            assert [logits[1, 0] for *_, logits in reader()] == [1 * 5, 4 * 8, 7 * 2]
        assert reader.stats().rows_cached == 9


def test_unfit_pieces_are_named(serve: Serve) -> None:
    """Pieces of one batch that do not fit together."""
    as_long_as_said = model(lambda ids: np.zeros((len(ids), int(ids.max())), "f4"), "int32[-1]", "float32[-1]")
    source = [(np.array([[1], [1], [3], [3]], "i4"), None)]
    with reader_of(serve(as_long_as_said, server={"max_batch_rows": 2}).endpoint, teacher_batch_size=2) as reader:
        reader.set_batch_generator(lambda: source)
        with pytest.raises(SettingsError, match=r"'y' has rows of shapes \[1\] and \[3\].*as one request"):
            list(reader())
    with reader_of(serve(as_long_as_said).endpoint) as reader:
        assert [logits.shape for *_, logits in reader.set_batch_generator(lambda: source)()] == [(4, 3)]
