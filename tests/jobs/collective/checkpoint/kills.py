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
import threading

import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State
from tests.waiting import wait_until


def train(told: mmap.mmap, parent: int, width: int) -> None:
    """Restore, say what was restored, or -2 for a mixture, and go on for as long as there is a parent."""
    model = torch.nn.Sequential(*(torch.nn.Linear(size, width) for size in (width, 10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    tensors = list(model.parameters())
    for one in tensors:
        optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)
    state = State(model=model, optimizer=optimizer, step=-1)
    checkpointer = Checkpointer(state, interval_steps=1)
    restored = checkpointer.restore()
    tensors += [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]
    wrong = restored >= 0 and any(bool((tensor != restored).any()) for tensor in tensors)
    told[8:16] = struct.pack("<q", -2 if wrong or state.step != restored else restored)
    chance, pause = random.Random(restored), threading.Event()
    for step in range(restored + 1, 10**9):
        if os.getppid() != parent:
            return
        with torch.no_grad():
            for one in tensors:
                one.fill_(step)
        state.step = step
        checkpointer.save(step)
        told[:8] = struct.pack("<q", step)
        pause.wait(chance.random() * 0.003)


def main(folder: str, rounds: int, width: int) -> None:
    os.environ["EDL_SLOTS"] = f"{folder}/slots"
    told, chance = mmap.mmap(-1, 16), random.Random(1)
    told[:] = struct.pack("<qq", -1, -1)
    parent = os.getpid()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what it needs, once for all children

    def said() -> tuple[int, int]:
        return struct.unpack("<qq", told)  # type: ignore[return-value]

    for _ in range(rounds):
        before, _ = said()
        child = os.fork()
        if child == 0:
            train(told, parent, width)
            os._exit(0)
        wait_until(lambda before=before: said()[0] >= before + 3 or said()[1] == -2, "the child makes progress")
        threading.Event().wait(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(before, said()[1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
