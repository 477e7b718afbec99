"""A training process that is killed again and again at random instants: `python -m ... FOLDER ROUNDS`.

Each child restores, checks that all it got is of one step, and trains on, until SIGKILL. In step n every number of the
state is n, so that a mixture would show. Prints for each round the last step told before the kill, and the one that the
next child restored.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time

import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state import State

DEADLINE_S = 60.0


def job(step: float) -> State:
    """A state with many tensors, large and small, and a plain value."""
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 300) for size in (300, 10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    state = State(model=model, optimizer=optimizer, step=step)
    fill(tensors_of(state), step)
    return state


def tensors_of(state: State) -> list[torch.Tensor]:
    parameters = list(state.model.parameters())
    return [*parameters, *(state.optimizer.state[one]["momentum_buffer"] for one in parameters)]


@torch.no_grad()
def fill(tensors: list[torch.Tensor], step: float) -> None:
    for tensor in tensors:
        tensor.fill_(step)


def train(told: mmap.mmap, parent: int) -> None:
    """Restore, say what was restored, and go on for as long as there is a parent."""
    state = job(-1)
    checkpointer = Checkpointer(state, interval_steps=1)
    restored = checkpointer.restore()
    tensors = tensors_of(state)
    wrong = any(bool((tensor != restored).any()) for tensor in tensors) or state.step != restored
    told[8:16] = struct.pack("<q", -2 if wrong else restored)
    for step in range(restored + 1, 10**9):
        if os.getppid() != parent:
            return
        fill(tensors, step)
        state.step = step
        checkpointer.save(step)
        told[:8] = struct.pack("<q", step)


def said(told: mmap.mmap) -> tuple[int, int]:
    return struct.unpack("<qq", told)  # type: ignore[return-value]


def main(folder: str, rounds: int) -> None:
    os.environ["EDL_SLOTS"] = f"{folder}/slots"
    told, chance = mmap.mmap(-1, 16), random.Random(1)
    told[:] = struct.pack("<qq", -1, -1)
    parent = os.getpid()
    job(-1)  # imports what the first optimizer needs, once for all children
    for _ in range(rounds):
        before, _ = said(told)
        told[8:16] = struct.pack("<q", -3)
        child = os.fork()
        if child == 0:
            train(told, parent)
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
    main(sys.argv[1], int(sys.argv[2]))
