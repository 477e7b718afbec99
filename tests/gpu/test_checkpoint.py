"""Saving and restoring a state on the GPU, bit for bit, also while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from edl.collective import Checkpointer, State

GIGABYTES = 10


def state_of(device: torch.device, nbytes: int) -> State:
    """Return a model and AdamW's moments of about `nbytes` in all, 12 bytes per parameter."""
    size = 4096 if device.type == "cuda" else 64
    layers = max(1, nbytes // 12 // size**2)
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(size, size, bias=False, device=device) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    return State(model=model, optimizer=optimizer, step=-1)


def train(state: State, step: int) -> None:
    """Make an update that depends on the step's number and on nothing else."""
    for number, parameter in enumerate(state.model.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3 * (step + 1) * (-1) ** number)
    state.optimizer.step()
    state.step = step


def tensors(state: State) -> list[torch.Tensor]:
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    return [*state.model.parameters(), *(value for value in moments if isinstance(value, torch.Tensor))]


def test_a_large_state_is_restored(device: torch.device, tmp_path: Path) -> None:
    nbytes = GIGABYTES << 30 if device.type == "cuda" else 1 << 20
    state = state_of(device, nbytes)
    with Checkpointer(state, interval_steps=1, storage=str(tmp_path)) as checkpointer:
        for step in range(2):
            train(state, step)
            checkpointer.save(step)
    expected = [tensor.cpu().clone() for tensor in tensors(state)]
    del state
    restored = state_of(device, nbytes)
    with Checkpointer(restored, storage=str(tmp_path)) as checkpointer:
        assert checkpointer.restore() == 1
        for found, wanted in zip(tensors(restored), expected, strict=True):
            assert found.device == device or found.ndim == 0
            assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("saved_step", [2, 5])
def test_saves_beside_training_disturb_nothing(device: torch.device, tmp_path: Path, saved_step: int) -> None:
    """What a save copies is the state of its step, and the updates queued right behind it come out the same."""
    nbytes = 1 << 30 if device.type == "cuda" else 1 << 20
    undisturbed = state_of(device, nbytes)
    for step in range(saved_step + 1):
        train(undisturbed, step)
    expected = [tensor.cpu().clone() for tensor in tensors(undisturbed)]
    for step in range(saved_step + 1, 8):
        train(undisturbed, step)
    last = [tensor.cpu().clone() for tensor in tensors(undisturbed)]
    del undisturbed

    state = state_of(device, nbytes)
    checkpointer = Checkpointer(state, interval_steps=1, storage=str(tmp_path))
    for step in range(8):
        train(state, step)
        if step <= saved_step:
            checkpointer.save(step)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(state), last, strict=True))
    restored = state_of(device, nbytes)
    state.step = -1
    other = Checkpointer(restored, slots=checkpointer._slots)
    assert other.restore() == saved_step
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(restored), expected, strict=True))
    other.close()
    checkpointer.close()
