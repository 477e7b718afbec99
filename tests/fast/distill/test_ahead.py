"""Batches read ahead in the training loop's own thread; and what Accelerate has prepared, which must be read there."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from edl.distill.torch import distill  # noqa: E402
from edl.errors import ClosedError, SettingsError  # noqa: E402
from tests.fast.distill.conftest import Served  # noqa: E402
from tests.waiting import wait_until  # noqa: E402


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    served = Served("echo", width=4)
    yield served.endpoint
    served.close()


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    """Rows of their number; notes in which thread each was read."""

    def __init__(self, failing: int = -1) -> None:
        self.threads: list[int] = []
        self._failing = failing

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.threads.append(threading.get_ident())
        if index == self._failing:
            raise RuntimeError("sample 13 is broken")
        return torch.full((4,), float(index))


@pytest.mark.parametrize("ahead", [0, 3])
def test_reads_in_the_loop_thread(teacher: str, ahead: int) -> None:
    data = Numbers()
    with distill(DataLoader(data, batch_size=2), teacher, inputs="x", outputs="y", ahead=ahead) as loader:
        for _ in range(2):
            epoch = iter(loader)
            next(epoch)  # left, with batches that were read
            assert len(data.threads) == min(20, 2 * (ahead + 1))
            data.threads.clear()
            found = list(loader)
            assert [rows[:, 0].tolist() for rows, _ in found] == [[n, n + 1.0] for n in range(0, 20, 2)]
            assert all(torch.equal(rows, labels) for rows, labels in found)
            assert set(data.threads) == {threading.get_ident()}
            data.threads.clear()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edl-feed")]


@pytest.mark.parametrize("advanced", [0, 2])
def test_dropped_loader_leaves_no_thread(teacher: str, advanced: int) -> None:
    """Nor does an iterator that never began: its generator has no `finally` to run."""
    loader = distill(DataLoader(Numbers(), batch_size=2), teacher, inputs="x", outputs="y", ahead=1)
    epoch = iter(loader)
    for _ in range(advanced):
        next(epoch)
    del epoch, loader

    def ended() -> bool:
        gc.collect()
        return not [thread for thread in threading.enumerate() if thread.name.startswith("edl-feed")]

    wait_until(ended, "the threads' end")


def test_session_ends_a_live_epoch(teacher: str, caplog: pytest.LogCaptureFixture) -> None:
    """The session alone, as at the program's end, does not wait for batches that nobody will read."""
    loader = distill(DataLoader(Numbers(), batch_size=2), teacher, inputs="x", outputs="y", ahead=1)
    epoch = iter(loader)
    next(epoch)
    loader._session.close()
    assert "still busy" not in caplog.text
    with pytest.raises(ClosedError):
        next(epoch)


def test_error_comes_in_its_place(teacher: str) -> None:
    loader = distill(DataLoader(Numbers(13), batch_size=2), teacher, inputs="x", outputs="y", ahead=8)
    delivered: list[float] = []
    with loader, pytest.raises(RuntimeError, match="sample 13 is broken"):
        delivered.extend(rows[0, 0].item() for rows, _ in loader)
    assert delivered == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("ahead", [-1, 1.5, True, "2"])
def test_ahead_is_a_number(teacher: str, ahead: Any) -> None:
    with pytest.raises(SettingsError, match="ahead="):
        distill([], teacher, inputs="x", outputs="y", ahead=ahead)


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
