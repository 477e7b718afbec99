"""What every side of `recovery` and `churn` trains, and how it logs its finished steps.

The model has two layers, 8.4 million parameters at a width of 2,048, and gets a few rows per step. It sleeps instead of
computing on a GPU, so that processes do not compete if there are more of them than cores. The backward pass, the
all-reduce, the optimizer and the copies of the state are real. This module needs only torch, since torchft has its own
environment.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["StateFile", "StepLog", "Task", "Training"]

_ROWS = 4
_BATCHES = 16

Reduce = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Task:
    """What a script trains, and where it writes.

    Attributes:
        folder: Folder for step logs, and for the checkpoints of scripts that write any.
        name: Name of the node, which stays the same if the node comes back.
        width: Width of the layers. The model has 2 * width * (width + 1) parameters.
        sleep_s: Seconds to sleep per step, in place of a GPU's work.
        save_s: Seconds between snapshots; 0 for an interval at which they cost 1% of the time, infinite for none.
    """

    folder: Path
    name: str
    width: int
    sleep_s: float
    save_s: float = 0.0

    @classmethod
    def from_arguments(cls) -> Task:
        """Read the command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--name", required=True)
        parser.add_argument("--width", type=int, required=True)
        parser.add_argument("--sleep-s", type=float, required=True)
        parser.add_argument("--save-s", type=float, default=0.0)
        return cls(**vars(parser.parse_args()))

    def arguments(self) -> list[str]:
        """Return the command line that `from_arguments` reads."""
        words = ["--folder", str(self.folder), "--name", self.name, "--width", str(self.width)]
        return [*words, "--sleep-s", str(self.sleep_s), "--save-s", str(self.save_s)]


class Training:
    """A model, its optimizer and fixed data, which are the same in every process."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self._sleep_s = task.sleep_s
        self.model = nn.Sequential(nn.Linear(task.width, task.width), nn.ReLU(), nn.Linear(task.width, task.width))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._inputs = torch.randn(_BATCHES, _ROWS, task.width, generator=generator)
        self._targets = torch.randn(_BATCHES, _ROWS, task.width, generator=generator)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, reduce: Reduce | None = None
    ) -> None:
        """Make a step with `model` and `optimizer`, wrapped or not. `reduce` averages gradients if `model` does not."""
        optimizer.zero_grad()
        batch = number % _BATCHES
        loss = nn.functional.mse_loss(model(self._inputs[batch]), self._targets[batch])
        time.sleep(self._sleep_s)
        loss.backward()  # type: ignore[no-untyped-call]
        if reduce is not None:
            reduce(model)
        optimizer.step()


class StateFile:
    """The state, saved with `torch.save`, from which a job without EDL resumes once all its ranks are gone."""

    EVERY_STEPS = 20
    """Steps between two files: 3 s of training, of which half is repeated on average. A file costs 1% of that time."""

    def __init__(self, task: Task) -> None:
        self._path = task.folder / "checkpoint.pt"
        self._enabled = task.save_s < math.inf

    def load(self) -> dict[str, Any] | None:
        """Return the newest saved state, or None if there is none."""
        return torch.load(self._path) if self._path.exists() else None

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """Save the state after step `step` if it is due, and return whether it was."""
        if not self._enabled or step % self.EVERY_STEPS:
            return False
        part = self._path.with_suffix(f".{os.getpid()}")
        torch.save(state(), part)
        part.replace(self._path)
        return True


class StepLog:
    """A file with a line for each finished step of a place (a local rank on a node), whichever process has it."""

    def __init__(self, task: Task, local_rank: int = 0) -> None:
        path = task.folder / f"{task.name}-{local_rank}.steps"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def finished(self, step: int, generation: int, world: int) -> None:
        """Log that the `world` ranks of `generation` have finished step `step`, counted from 0."""
        os.write(self._file, f"step {time.monotonic():.6f} {step} {generation} {world} {os.getpid()}\n".encode())

    def saved(self, step: int) -> None:
        """Log that the state after that step has been saved."""
        os.write(self._file, f"saved {step}\n".encode())
