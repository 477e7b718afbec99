"""Saves that are copied beside the next forward and backward pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory import copying
from edl.collective.checkpoint.memory.slots import SlotPair, find_slots
from edl.collective.checkpoint.state.state import State
from tests.waiting import DEADLINE_S

WIDTH = 1200  # with momentum some 11 MB, which are worth a thread


def state_of(seed: int) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(rng=False, model=model, optimizer=optimizer, note=torch.zeros(2_000_000))
    train(state)
    return state


def train(state: State) -> None:
    state.model(torch.randn(4, WIDTH)).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def tensors(state: State) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.capture().tensors]


def test_saved_state_is_that_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no turn: the optimizer's step waits, and copies itself."""
    held, work = threading.Event(), copying._Job.work

    def work_late(job: copying._Job) -> None:
        held.wait(DEADLINE_S)
        work(job)

    def submit(self: copying.TensorCopier, job: copying._Job) -> None:
        threading.Thread(target=work_late, args=(job,), daemon=True).start()

    state, prefix = state_of(0), tmp_path / "slots"
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(prefix)) as checkpointer:
        for step in range(4):
            if step == 2:  # both slots have their memory
                monkeypatch.setattr(copying.TensorCopier, "_submit", submit)
            train(state)
            before = tensors(state)
            assert checkpointer.save(step)
            if step > 1:
                assert find_slots(prefix)[0].header.step == step - 1, "so it is under way"
            state.note += 1
            state.model(torch.randn(4, WIDTH))  # changes what batch normalization remembers
            train(state)
            with Checkpointer(restored := state_of(1), slots=SlotPair(prefix)) as other:
                assert other.restore() == step
            assert all(map(torch.equal, tensors(restored), before))
        held.set()
