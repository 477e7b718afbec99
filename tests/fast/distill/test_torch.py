"""`distill` around a real `DataLoader`, its workers included, and loaders that Accelerate prepared; wrong settings."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset  # noqa: E402

from edl.distill import DistillReader, Options, Teachers  # noqa: E402
from edl.distill.cache import SoftLabelCache  # noqa: E402
from edl.distill.losses import DistillLoss  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.distill.transport.schema import OutputSpec  # noqa: E402
from edl.errors import SettingsError, SourceError, TemporaryError  # noqa: E402
from tests.fast.distill.conftest import Served  # noqa: E402
from tests.waiting import DEADLINE_S, wait_until  # noqa: E402

WIDTH = 4
PATIENT = Options(teacher_timeout_s=60)


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    with contextlib.closing(Served("echo", width=WIDTH)) as served:
        yield served.endpoint


class Numbers(Dataset[tuple[Any, int]]):
    """Rows of their number, with it; notes in which thread each was read."""

    def __init__(self, count: int, failing: int = -1) -> None:
        self.count, self.failing = count, failing
        self.threads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.threads.append(threading.get_ident())
        if index == self.failing:
            raise RuntimeError("sample 13 is broken")
        return torch.full((WIDTH,), float(index)), index


def check(pairs: list[Any], count: int) -> None:
    seen: list[int] = []
    for (images, numbers), soft in pairs:
        assert isinstance(soft, torch.Tensor)
        assert (soft[:, 0] == numbers).all()
        assert (images[:, 0] == numbers).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(count))


def test_persistent_workers_and_iterables(teacher: str) -> None:

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.full((WIDTH,), float(i)), i) for i in range(100))

    stream = DataLoader(Stream(), batch_size=16)
    with distill(stream, teacher, inputs="x", outputs="y", options=PATIENT) as loader:
        check(list(loader), 100)
        with pytest.raises(TypeError):
            len(loader)
    kept = DataLoader(Numbers(100), batch_size=16, num_workers=2, persistent_workers=True)
    with distill(kept, teacher, inputs="x", outputs="y", options=PATIENT) as loader:
        for _ in range(3):
            check(list(loader), 100)
    end_workers(kept)


@pytest.mark.parametrize("next_reader", ["the same", "another", "another, ahead"])
def test_busy_loader_has_one_reader(teacher: str, monkeypatch: pytest.MonkeyPatch, next_reader: str) -> None:
    """While the thread of the epoch before waits for a persistent worker, the next one waits, and is whole then."""
    monkeypatch.setattr("edl.distill.pipeline.session._SOURCE_STOP_S", 0)
    busy, go = multiprocessing.Event(), multiprocessing.Event()

    class Slow(Numbers):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            if index == 40:
                busy.set()
                assert go.wait(DEADLINE_S)
            return super().__getitem__(index)

    kept = DataLoader(Slow(100), batch_size=16, num_workers=1, persistent_workers=True)
    asked: Any = {"inputs": "x", "outputs": "y", "options": Options(teacher_timeout_s=60, source_timeout_s=0.1)}
    loader = distill(kept, teacher, **asked)
    epoch = iter(loader)
    next(epoch)
    assert busy.wait(DEADLINE_S)
    wait_until(lambda: loader.stats().rows_asked == 32, "the thread is at the worker's batch")
    if next_reader != "the same":
        loader.close()
        loader = distill(kept, teacher, ahead=1 if "ahead" in next_reader else None, **asked)
    with loader:
        with pytest.raises(TemporaryError, match="source_timeout_s"):
            iter(loader)
        go.set()
        wait_until(lambda: "edl-feed" not in {thread.name for thread in threading.enumerate()})
        check(list(loader), 100)
    end_workers(kept)


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's persistent workers now: the garbage collector would wait for each of them in turn."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]  # there is no public way


def test_labels_are_moved_to_the_device(teacher: str) -> None:
    data = DataLoader(Numbers(50), batch_size=8)
    loader = distill(data, teacher, inputs="x", outputs="y", device="meta", options=PATIENT)
    with loader:
        pairs = list(loader)
    assert len(pairs) == 7
    for (images, numbers), soft in pairs:
        assert {images.device.type, numbers.device.type, soft.device.type} == {"meta"}


def test_order_is_drawn_in_the_loops_thread(teacher: str) -> None:
    """A seed gives the same order each time, also where a trainer begins an epoch that it drops."""
    drawn_by: list[threading.Thread] = []

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            drawn_by.append(threading.current_thread())
            yield from torch.randperm(50).tolist()

    class Loader(DataLoader[Any]):
        """A trainer's own kind."""

    data = Loader(Numbers(50), batch_size=8, sampler=Order())
    with distill(data, teacher, inputs="x", outputs="y", options=PATIENT) as loader:
        iter(loader)
        check(list(loader), 50)
    assert drawn_by == [threading.main_thread()] * 2


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
    ended = DataLoader(Numbers(4), collate_fn=lambda _: next(iter(())))
    with distill(ended, [], inputs="x", outputs="y") as loader, pytest.raises(SourceError, match="StopIteration"):
        list(loader)


# Batches read ahead in the training loop's own thread.


@pytest.mark.parametrize("ahead", [0, 3])
def test_reads_in_the_loop_thread(teacher: str, ahead: int) -> None:
    data = Numbers(20)
    with distill(DataLoader(data, batch_size=2), teacher, inputs="x", outputs="y", ahead=ahead) as loader:
        for _ in range(2):
            epoch = iter(loader)
            next(epoch)  # left, with batches that were read
            assert len(data.threads) == min(20, 2 * (ahead + 1))
            data.threads.clear()
            found = list(loader)
            assert [numbers.tolist() for (_, numbers), _ in found] == [[n, n + 1] for n in range(0, 20, 2)]
            check(found, 20)
            assert set(data.threads) == {threading.get_ident()}
            data.threads.clear()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edl-feed")]


@pytest.mark.parametrize("advanced", [0, 2])
def test_dropped_loader_leaves_no_thread(teacher: str, advanced: int) -> None:
    """Nor does an iterator that never began: its generator has no `finally` to run."""
    loader = distill(DataLoader(Numbers(20), batch_size=2), teacher, inputs="x", outputs="y", ahead=1)
    epoch = iter(loader)
    for _ in range(advanced):
        next(epoch)
    del epoch, loader

    def ended() -> bool:
        gc.collect()
        return not [thread for thread in threading.enumerate() if thread.name.startswith("edl-feed")]

    wait_until(ended, "the threads' end")


def test_error_comes_in_its_place(teacher: str) -> None:
    loader = distill(DataLoader(Numbers(20, 13), batch_size=2), teacher, inputs="x", outputs="y", ahead=8)
    delivered: list[int] = []
    with loader, pytest.raises(RuntimeError, match="sample 13 is broken"):
        delivered.extend(numbers[0].item() for (_, numbers), _ in loader)
    assert delivered == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("ahead", [None, 0, 3])
def test_prepared_loader_ends_where_it_ends(teacher: str, ahead: int | None) -> None:
    """Gradients are synchronized in the same batches as without teachers, and as many rows are gathered."""
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def train(labelled: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(104.0).reshape(26, 4) / 100)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        wrapped = distill(loader, teacher, inputs=["x"], outputs="y", ahead=ahead) if labelled else None
        seen = []
        for _ in range(2):
            for item in wrapped or loader:
                (rows,) = item[0] if labelled else item
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                state = accelerator.gradient_state
                gathered = len(accelerator.gather_for_metrics(rows))
                seen.append((accelerator.sync_gradients, state.end_of_dataloader, state.remainder, gathered))
            assert accelerator.gradient_state.active_dataloader is None
        if wrapped is not None:
            wrapped.close()
        return seen, model.weight.detach()

    with_labels, without = train(True), train(False)
    assert with_labels[0] == without[0]
    assert torch.equal(with_labels[1], without[1])


READ: dict[str, Any] = {"ins": ["x"], "predicts": ["y"]}
ASKED: dict[str, Any] = {"loader": [], "teachers": "s", "inputs": "x", "outputs": "y"}
BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Options, {"teacher_timeout_s": "5"}, r"teacher_timeout_s='5': must be a number of seconds above 0"),
    (Options, {"memory_bytes": "1GB"}, r"memory_bytes='1GB': must be a whole number of bytes, at least one MiB"),
    (OutputSpec, {"outputs": ("y",), "temperature": "4"}, r"temperature='4': must be a finite number above 0"),
    (OutputSpec, {"outputs": ("y",), "top_k": 0}, r"top_k=0: must be a whole number of at least 1"),
    (Teachers, {"service": "s", "max_teachers": 0}, r"max_teachers=0: must be a whole number of at least 1"),
    (DistillReader, {**READ, "ins": 3}, r"ins=3: name at least one input"),
    (DistillReader, {**READ, "ins": ["x", "x"]}, r"ins=\['x', 'x'\]: a name appears twice"),
    (distill, {**ASKED, "inputs": ["x", ""]}, r"inputs=\['x', ''\]: name at least one input"),
    (DistillReader, {**READ, "cache": "labels", "id_field": 1}, "cache='labels': expected an edl.distill.cache.Soft"),
    (DistillReader, {**READ, "predicts": 3}, r"predicts=3: expected a list of output names"),
    (DistillReader, {**READ, "teachers": 3}, r"teachers=3: expected a service's name"),
    (DistillReader, {**READ, "teacher_batch_size": 0}, r"teacher_batch_size\)=0"),
    (DistillReader, {**READ, "teachers": "a", "route": 1}, "needs the teachers for each value"),
    (DistillReader, {**READ, "teachers": {"a": "b"}}, "name the field with route="),
    (DistillReader, {**READ, "teachers": {"a": [Teachers("b")]}, "route": 0}, "an ensemble cannot be"),
    (DistillReader, {**READ, "teachers": {"a": "b"}, "route": 0, "combine": "mean"}, "omit combine"),
    (lambda: DistillReader(**READ, teachers={"a": "b"}, route=0).set_fixed_teacher("c:1"), {}, "with route="),
    (lambda: DistillReader(**READ).set_fixed_teacher("c:1").set_dynamic_teacher(None, "s"), {}, r"already set \(c:1\)"),
    (lambda: DistillReader(**READ).set_fixed_teacher("localhost"), {}, r"expected host:port.*Teachers\(service"),
    (distill, {**ASKED, "teachers": "http://127.0.0.1:45001"}, "a URL; did you mean '127.0.0.1:45001'"),
    (DistillReader, {**READ, "teachers": ["kubernetes://ns/x"]}, "a URL; name a service"),
    (lambda: DistillReader(**READ).set_sample_generator(list).set_batch_generator(list), {}, "already set"),
    (lambda: DistillReader(**READ).set_sample_generator(iter([])), {}, "not the iterator"),  # type: ignore[arg-type]
    (lambda: DistillReader(**READ).set_sample_generator(list)(), {}, "EDL_SERVICE"),
    (lambda: DistillReader(**READ, teachers="s")(), {}, "no data source"),
    (distill, {**ASKED, "outputs": 3}, r"outputs=3: expected the name"),
    (distill, {**ASKED, "batch_rows": "8"}, r"batch_rows .*='8'"),
    (distill, {**ASKED, "ahead": -1}, "ahead=-1"),
    (distill, {**ASKED, "ahead": 1.5}, "ahead=1.5"),
    (distill, {**ASKED, "inputs": 3}, r"inputs=3: name at least one input of the teachers, such as \"image\", \["),
    (distill, {**ASKED, "cache": SoftLabelCache()}, "cache without ids: say with ids= where"),
    (distill, {**ASKED, "teachers": None, "cache": SoftLabelCache(), "ids": 1}, "no teachers are named"),
    (distill, {**ASKED, "teachers": ""}, "teachers='': name a service"),  # a slip, as a variable that is not set
    (DistillLoss, {"alpha": "0.5"}, r"alpha='0\.5': the share of the soft loss must be from 0 to 1"),
]


@pytest.mark.parametrize(("kind", "values", "words"), BAD)
def test_unusable_values_are_named(kind: Callable[..., Any], values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        kind(**values)
