"""A training process that is killed again and again at random instants: `python -m ... FOLDER ROUNDS WIDTH`.

Each child restores, checks that all it got is of one step, and trains on, until SIGKILL. In step n every number of the
state is n, so that a mixture would show. With a great WIDTH the state is copied beside the next step. Prints for each
round the last step told before the kill, and the one that the next child restored.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time
from typing import Any

import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State

DEADLINE_S = 60.0


class Counting(torch.optim.Optimizer):
    """Each step makes all parameters and moments a given number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.number = -1.0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = torch.full_like(parameter, -1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(self.number)
            self.state[parameter]["moment"].fill_(self.number)


def job(width: int) -> State:
    """A state with many tensors, large and small, and a plain value."""
    model = torch.nn.Sequential(*(torch.nn.Linear(size, width) for size in (width, 10, 1)))
    return State(model=model, optimizer=Counting(model.parameters()), step=-1)


def tensors_of(state: State) -> list[torch.Tensor]:
    parameters = list(state.model.parameters())
    return [*parameters, *(state.optimizer.state[one]["moment"] for one in parameters)]


def train(told: mmap.mmap, parent: int, width: int) -> None:
    """Restore, say what was restored, and go on for as long as there is a parent."""
    state = job(width)
    checkpointer = Checkpointer(state, interval_steps=1)
    restored = checkpointer.restore()
    tensors = tensors_of(state) if restored >= 0 else []
    wrong = any(bool((tensor != restored).any()) for tensor in tensors) or state.step != restored
    told[8:16] = struct.pack("<q", -2 if wrong else restored)
    chance = random.Random(restored)
    for step in range(restored + 1, 10**9):
        if os.getppid() != parent:
            return
        state.optimizer.number = step
        state.optimizer.step()
        state.step = step
        checkpointer.save(step)
        told[:8] = struct.pack("<q", step)
        time.sleep(chance.random() * 0.003)


def said(told: mmap.mmap) -> tuple[int, int]:
    return struct.unpack("<qq", told)  # type: ignore[return-value]


def main(folder: str, rounds: int, width: int) -> None:
    os.environ["EDL_SLOTS"] = f"{folder}/slots"
    told, chance = mmap.mmap(-1, 16), random.Random(1)
    told[:] = struct.pack("<qq", -1, -1)
    parent = os.getpid()
    job(1)  # imports what the first optimizer needs, once for all children
    for _ in range(rounds):
        before, _ = said(told)
        told[8:16] = struct.pack("<q", -3)
        child = os.fork()
        if child == 0:
            train(told, parent, width)
            os._exit(0)
        deadline = time.monotonic() + DEADLINE_S
        while said(told)[0] < before + 3 and said(told)[1] != -2:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                raise SystemExit("the child makes no progress")
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(before, said(told)[1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
