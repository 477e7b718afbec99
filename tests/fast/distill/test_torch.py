"""`distill` around a real `DataLoader`, its workers included, with real teacher processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler  # noqa: E402

from edl.distill import Options  # noqa: E402
from edl.distill.cache import SoftLabelCache  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.errors import NoTeacherError, SettingsError  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402

WIDTH = 4
PATIENT = Options(teacher_timeout_s=60)


class Numbers(Dataset[tuple[Any, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.full((WIDTH,), float(index)), index


def check(pairs: list[Any], count: int) -> None:
    seen: list[int] = []
    for (images, numbers), soft in pairs:
        assert isinstance(soft, torch.Tensor)
        assert (soft[:, 0] == numbers).all()
        assert (images[:, 0] == numbers).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(count))


def test_persistent_workers_and_iterables(serve: Serve) -> None:
    """Persistent workers and iterable datasets work."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.full((WIDTH,), float(i)), i) for i in range(100))

    endpoint = serve("echo").endpoint
    stream = DataLoader(Stream(), batch_size=16)
    with distill(stream, endpoint, inputs="x", outputs="y", options=PATIENT) as loader:
        check(list(loader), 100)
        with pytest.raises(TypeError):
            len(loader)
    kept = DataLoader(Numbers(100), batch_size=16, num_workers=2, persistent_workers=True)
    with distill(kept, endpoint, inputs="x", outputs="y", options=PATIENT) as loader:
        for _ in range(3):
            check(list(loader), 100)
    end_workers(kept)


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's persistent workers now: the garbage collector would wait for each of them in turn."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def test_labels_are_moved_to_the_device(serve: Serve) -> None:
    """Labels and batches are moved to the device."""
    data = DataLoader(Numbers(50), batch_size=8)
    loader = distill(data, serve("echo").endpoint, inputs="x", outputs="y", device="meta", options=PATIENT)
    with loader:
        pairs = list(loader)
    assert len(pairs) == 7
    for (images, numbers), soft in pairs:
        assert {images.device.type, numbers.device.type, soft.device.type} == {"meta"}


def test_order_is_drawn_in_the_loops_thread(serve: Serve) -> None:
    """A seed gives the same order each time, also where a trainer begins an epoch that it drops."""
    drawn_by: list[threading.Thread] = []

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            drawn_by.append(threading.current_thread())
            yield from torch.randperm(50).tolist()

    data = DataLoader(Numbers(50), batch_size=8, sampler=Order())
    with distill(data, serve("echo").endpoint, inputs="x", outputs="y", options=PATIENT) as loader:
        iter(loader)
        check(list(loader), 50)
    assert drawn_by == [threading.main_thread()] * 2


def test_second_epoch_is_cached(serve: Serve, tmp_path: Any) -> None:
    """The second epoch asks nothing with a cache."""
    teacher = serve("echo")
    data = DataLoader(Numbers(120), batch_size=16, shuffle=True)
    options: dict[str, Any] = {"inputs": ["x", None], "outputs": "y", "ids": 1, "dataset": "numbers"}
    with SoftLabelCache(path=tmp_path / "labels") as cache:
        with distill(data, teacher.endpoint, cache=cache, options=PATIENT, **options) as loader:
            check(list(loader), 120)
            assert loader.stats().rows_asked == 120
            check(list(loader), 120)
            check(list(loader), 120)
            assert loader.stats().rows_asked == 120
            assert loader.stats().rows_cached == 240
        wider = DataLoader(Numbers(150), batch_size=50, shuffle=True)
        with distill(wider, teacher.endpoint, cache=cache, options=PATIENT, **options) as loader:
            check(list(loader), 150)
            assert loader.stats().rows_asked == 30, "only what is new, also where it shares a batch with what is not"
    teacher.close()
    with SoftLabelCache(path=tmp_path / "labels") as cache:
        with distill(data, cache=cache, **options) as loader:
            check(list(loader), 120)
        missing = DataLoader(Numbers(200), batch_size=50)
        with distill(missing, cache=cache, **options) as loader, pytest.raises(NoTeacherError, match="sample 150"):
            list(loader)


def test_no_teachers_same_batches() -> None:
    """An empty list trains without teachers by the same loop: the same batches, None for labels, nobody asked."""
    data = DataLoader(Numbers(50), batch_size=8, num_workers=2)
    with SoftLabelCache() as cache:
        settings: dict[str, Any] = {"cache": cache, "ids": 1, "dataset": "numbers", "device": "cpu"}
        with distill(data, [], inputs=["x", None], outputs="y", **settings) as loader:
            assert len(loader) == len(data)
            for _ in range(2):
                pairs = list(loader)
                assert [labels for _, labels in pairs] == [None] * 7
                assert [n for (_, numbers), _ in pairs for n in numbers.tolist()] == list(range(50))
            for _ in loader:
                break
            assert len(list(loader.label(list(data)[5:]))) == 2
            assert loader.stats().rows_asked == loader.stats().teachers_live == 0
    with pytest.raises(SettingsError, match="teachers='': name a service"):
        distill(data, "", inputs="x", outputs="y")  # an empty text is a slip, as a variable that is not set


def test_mistakes_are_named() -> None:
    data = DataLoader(Numbers(5), batch_size=5)
    with pytest.raises(SettingsError, match="name at least one input"):
        distill(data, "s", inputs=[None], outputs="y")
    with pytest.raises(SettingsError, match=r"inputs=3: name at least one input of the teachers, as in \"image\", \["):
        distill(data, "s", inputs=3, outputs="y")  # type: ignore[arg-type]
    with SoftLabelCache() as cache, pytest.raises(SettingsError, match="cache without ids: say where"):
        distill(data, "s", inputs="x", outputs="y", cache=cache)
    with SoftLabelCache() as cache, pytest.raises(SettingsError, match="no teachers are named"):
        distill(data, inputs="x", outputs="y", cache=cache, ids=1)
