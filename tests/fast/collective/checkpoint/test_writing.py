"""Saves that are copied beside the next forward and backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory import copying
from edl.collective.checkpoint.memory.slots import SlotPair, find_slots
from edl.collective.checkpoint.state.metadata import parse_meta
from edl.collective.checkpoint.state.state import State

WIDTH = 1200  # with momentum some 11 MB, which are worth a thread


@pytest.fixture
def state() -> State:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = State(rng=False, model=model, optimizer=optimizer, note=torch.zeros(2_000_000))
    train(made)
    return made


class Held:
    """Copying does not get on while this is held."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def work(self, job: object) -> None:
        assert self.go.wait(20)
        WORK(job)  # type: ignore[arg-type]


WORK = copying._Job.work


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """The helping thread, to be stopped."""
    held = Held()

    def submit(self: copying.TensorCopier, job: object) -> None:
        threading.Thread(target=held.work, args=(job,), daemon=True).start()

    monkeypatch.setattr(copying.TensorCopier, "_submit", submit)
    yield held
    held.go.set()


def train(state: State) -> None:
    loss = state.model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def tensors(state: State) -> dict[str, torch.Tensor]:
    captured = state.capture()
    return {entry.key: tensor.clone() for entry, tensor in zip(captured.entries, captured.tensors, strict=True)}


def saved(prefix: Path, step: int) -> dict[str, torch.Tensor]:
    """The newest state in the slots, which has to be that after `step`."""
    found = find_slots(prefix)[0]
    assert found.header.step == step
    copy = found.copy_contents()
    assert copy is not None
    loaded: dict[str, torch.Tensor] = {}
    for entry in parse_meta(copy.meta).entries:
        data = bytes(copy.data[entry.offset : entry.offset + entry.nbytes])
        loaded[entry.key] = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
    return loaded


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[key], others[key]) for key in some)


def test_saved_state_is_that_before_the_step(tmp_path: Path, state: State, helper: Held) -> None:
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(4):
            train(state)
            if step > 1:  # both slots have their memory
                helper.go.clear()
            before = tensors(state)
            assert checkpointer.save(step)
            if step > 1:
                assert find_slots(tmp_path / "slots")[0].header.step == step - 1  # so it is under way
            state.note += 1
            state.model(torch.randn(4, WIDTH))  # changes what batch normalization remembers
            assert not same(before, tensors(state))
            train(state)  # waits, and copies, since nobody else does
            assert same(saved(tmp_path / "slots", step), before)
            helper.go.set()


def test_other_change_drops_the_save(
    tmp_path: Path, state: State, helper: Held, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(2):
            checkpointer.save(step)
        before = tensors(state)
        train(state)
        helper.go.clear()
        checkpointer.save(2)
        with torch.no_grad():
            state.model[0].weight.clamp_(-0.01, 0.01)
        assert not checkpointer.wait_until_finished()
        assert same(saved(tmp_path / "slots", 1), before)
        assert "from now on saves wait for the copy" in caplog.text
        checkpointer.save(3)
        assert same(saved(tmp_path / "slots", 3), tensors(state))  # at once: nobody helps
