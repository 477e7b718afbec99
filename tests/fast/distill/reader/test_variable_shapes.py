"""Rows whose shapes differ from request to request: texts padded to the longest of their batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.compress import TopK, top_k
from edl.errors import SettingsError, SourceError
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until

CLASSES = 11
PATIENT = Options(teacher_timeout_s=60)
MODELS = f"""
import numpy as np
from edl.testing.models import Model

def per_token(**options):
    def answer(inputs):
        return {{"logits": np.sin(inputs["ids"][..., None] * 0.37 + np.arange({CLASSES}, dtype="f4")).astype("f4")}}
    return Model(answer, ["ids:int32[-1]"], ["logits:float32[-1,{CLASSES}]"], **options)

def per_text(**options):
    def answer(inputs):
        return {{"logits": inputs["ids"].sum(1, keepdims=True).astype("f4")}}
    return Model(answer, ["ids:int32[-1]"], ["logits:float32[1]"], **options)

def as_long_as_said(**options):
    def answer(inputs):
        return {{"logits": np.zeros((len(inputs["ids"]), int(inputs["ids"].max())), "f4")}}
    return Model(answer, ["ids:int32[-1]"], ["logits:float32[-1]"], **options)
"""


@pytest.fixture
def teacher(start: Start, tmp_path: Path) -> Any:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return lambda name, **options: start(f"{path}:{name}", **options)


def expected(ids: Any) -> Any:
    return np.sin(ids[..., None] * 0.37 + np.arange(CLASSES, dtype="f4")).astype("f4")


def batches(*lengths: int, rows: int = 3) -> Iterator[tuple[Any, Any]]:
    for at, length in enumerate(lengths):
        numbers = np.arange(rows) + rows * at
        yield np.repeat(numbers[:, None], length, 1).astype("i4"), numbers


def reader_of(*teachers: LocalTeacher, **kwargs: Any) -> DistillReader:
    kwargs.setdefault("options", PATIENT)
    endpoints = [one.endpoint for one in teachers]
    return DistillReader(["ids", None], ["logits"], teachers=endpoints, **kwargs)


@pytest.mark.parametrize("rows", [None, 2])
def test_lengths_of_labels_follow_batches(teacher: Any, rows: int | None) -> None:
    """Batches of different lengths get labels of their own lengths."""
    lengths = [5, 8, 5, 1, 13, 8, 2] * 5
    with reader_of(teacher("per_token"), teacher("per_token"), teacher_batch_size=rows) as reader:
        reader.set_batch_generator(lambda: batches(*lengths))
        list(reader())
        until(lambda: reader.stats().teachers_live == 2, 20)
        delivered = list(reader())
        assert all(one.failures == 0 for one in reader.stats().teachers.values())
    assert [ids.shape[1] for ids, *_ in delivered] == lengths
    for ids, _, logits in delivered:
        np.testing.assert_allclose(logits, expected(ids), rtol=1e-5)


def test_top_k_of_different_lengths(teacher: Any) -> None:
    with reader_of(teacher("per_token"), top_k=3, teacher_batch_size=2) as reader:
        reader.set_batch_generator(lambda: batches(5, 8, 2))
        delivered = list(reader())
    assert [labels.ids.shape for *_, labels in delivered] == [(3, 5, 3), (3, 8, 3), (3, 2, 3)]
    for ids, _, labels in delivered:
        assert isinstance(labels, TopK)
        assert (labels.ids == top_k(expected(ids), 3).ids).all()


def test_cached_labels_keep_their_length(teacher: Any) -> None:
    """Labels from a cache are never of another length than the inputs."""
    with (
        SoftLabelCache() as cache,
        reader_of(teacher("per_token"), cache=cache, id_field=1) as reader,
    ):
        lengths = [5, 5]
        reader.set_batch_generator(lambda: batches(*lengths))
        assert [logits.shape for *_, logits in reader()] == [(3, 5, CLASSES)] * 2
        assert [logits.shape for *_, logits in reader()] == [(3, 5, CLASSES)] * 2
        assert reader.stats().rows_cached == 6
        lengths = [8, 8]
        with pytest.raises(SettingsError, match=r"'ids' has rows of shape \[8\], before it \[5\].*Pad all batches"):
            list(reader())


def test_cache_keeps_one_label_shape(teacher: Any) -> None:
    """A cache keeps labels of one shape for texts of any length."""
    with (
        SoftLabelCache() as cache,
        reader_of(teacher("per_text"), cache=cache, id_field=1) as reader,
    ):
        reader.set_batch_generator(lambda: batches(5, 8, 2))
        first, second = list(reader()), list(reader())
    assert [logits[1, 0] for *_, logits in first] == [1 * 5, 4 * 8, 7 * 2]
    assert [logits[1, 0] for *_, logits in second] == [1 * 5, 4 * 8, 7 * 2]


def test_unfit_pieces_are_named(teacher: Any) -> None:
    """Pieces of one batch that do not fit together are named."""
    source = [(np.array([[1], [1], [3], [3]], "i4"), None)]
    with reader_of(teacher("as_long_as_said", max_batch=2), teacher_batch_size=2) as reader:
        reader.set_batch_generator(lambda: source)
        with pytest.raises(SettingsError, match=r"'logits' has rows of shapes \[1\] and \[3\].*as one request"):
            list(reader())
    with reader_of(teacher("as_long_as_said")) as reader:
        reader.set_batch_generator(lambda: source)
        assert [logits.shape for *_, logits in reader()] == [(4, 3)]


def test_lengths_need_own_requests(teacher: Any) -> None:
    """Samples of different lengths need requests of their own."""

    def source() -> Iterator[Any]:
        yield from ((np.full(length, length, "i4"), None) for length in (5, 8, 2))

    with (
        reader_of(teacher("per_token")).set_sample_generator(source) as reader,
        pytest.raises(SourceError, match=r"sample 1: input 'ids' has shape \[8\].*set_teacher_batch_size\(1\)"),
    ):
        list(reader())
    with reader_of(teacher("per_token"), teacher_batch_size=1).set_sample_generator(source) as reader:
        delivered = list(reader())
    assert [logits.shape for *_, logits in delivered] == [(5, CLASSES), (8, CLASSES), (2, CLASSES)]
    for ids, _, logits in delivered:
        np.testing.assert_allclose(logits, expected(ids), rtol=1e-5)
