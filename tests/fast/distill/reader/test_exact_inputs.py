"""Inputs of uncommon types through a real teacher and back: the same, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import SourceError
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start

MODELS = """
from edl.testing.models import Model

def words(**options):
    return Model(lambda inputs: {"y": list(inputs["x"])}, ["x:BYTES"], ["y:BYTES"], **options)

def numbers(**options):
    return Model(lambda inputs: {"y": inputs["x"].copy()}, ["x:int64[3]"], ["y:int64[3]"], **options)
"""


@pytest.fixture
def teacher(start: Start, tmp_path: Path) -> Callable[[str], LocalTeacher]:
    path = tmp_path / "echoes.py"
    path.write_text(MODELS)
    return lambda name: start(f"{path}:{name}")


def reader_of(teacher: LocalTeacher, **options: Any) -> DistillReader:
    return DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=Options(**options))


def test_clips_come_back_with_their_nuls(teacher: Callable[[str], LocalTeacher]) -> None:
    clips = [np.arange(-3, 3, dtype="<i2") * number for number in range(40)]  # the last samples of many are 0
    expected = [(clip.tobytes(), clip.tobytes()) for clip in clips]
    model = teacher("words")
    with reader_of(model).set_sample_generator(lambda: ((clip.tobytes(),) for clip in clips)) as reader:
        assert list(reader()) == expected
    with reader_of(model).set_batch_generator(lambda: [([clip.tobytes() for clip in clips],)]) as reader:
        ((sent, back),) = reader()
        assert list(zip(sent, back.tolist(), strict=True)) == expected
    with (
        reader_of(model).set_batch_generator(lambda: [(np.array([b"ab", b"c"]),)]) as reader,
        pytest.raises(SourceError, match="ends in NULs"),
    ):
        list(reader())


@pytest.mark.parametrize("shared_memory", [True, False])
def test_large_and_turned_numbers_come_back(teacher: Callable[[str], LocalTeacher], shared_memory: bool) -> None:
    batches = [
        np.array([[2**63 - 1, -(2**63), 0]] * 4).astype(">i8"),
        np.arange(24, dtype=np.int64).reshape(3, 8).T[::-1],
        np.arange(36, dtype=np.int32).reshape(4, 9)[:, ::3],
    ]

    def source() -> Iterator[Any]:
        yield from ((batch,) for batch in batches)

    with reader_of(teacher("numbers"), shared_memory=shared_memory).set_batch_generator(source) as reader:
        for batch, (sent, back) in zip(batches, reader(), strict=True):
            assert sent is batch
            assert back.tolist() == batch.tolist()


def test_a_stop_in_a_data_set_is_an_error(teacher: Callable[[str], LocalTeacher]) -> None:
    """480 of 1,000 samples, and then the end of the epoch without a word."""
    torch_data = pytest.importorskip("torch.utils.data")
    rows = iter(range(480))

    class Data(torch_data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, at: int) -> Any:
            return np.full(3, next(rows), np.int64)

    loader = torch_data.DataLoader(Data(), batch_size=20)
    with reader_of(teacher("numbers")).set_batch_generator(lambda: ((batch,) for batch in loader)) as reader:
        assert len(list(reader())) == 24, "a generator of the user's own that hides the loader"
    rows = iter(range(480))
    from edl.distill.torch import distill

    found = []
    with (
        distill(loader, [teacher("numbers").endpoint], inputs="x", outputs="y") as labelled,
        pytest.raises(SourceError, match=r"after 24 batches .* raised StopIteration"),
    ):
        found.extend(len(batch) for batch, _ in labelled)
    assert sum(found) == 480
