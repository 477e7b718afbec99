"""The script of the tests' Paddle jobs: a small net, trained on data that depend on the step and the rank only.

It is trained without EDL, then with it, while trainers kill themselves where the environment's `KILLS` says, JSON of a
list of `[generation, rank, step, where]`. In the end the second trainer raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of paddle's own imports
    import paddle

import numpy as np

from edl.collective.paddle import Checkpointer, PaddleState, init_parallel_env

GENERATION = int(os.environ["EDL_GENERATION"])
KILLS = [tuple(kill) for kill in json.loads(os.environ["KILLS"])]
STEPS = 14


def say(**what: Any) -> None:
    """One line, which the test reads."""
    what |= {"generation": GENERATION, "rank": paddle.distributed.get_rank()}
    log = os.open("said.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, json.dumps(what).encode() + b"\n")
    os.close(log)


def die(step: int, where: str) -> None:
    if (GENERATION, paddle.distributed.get_rank(), step, where) in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


class Training:
    """A net, what it is trained with, and steps of it."""

    def __init__(self, mortal: bool) -> None:
        self.mortal = mortal
        paddle.seed(1)
        layers = [paddle.nn.Linear(8, 16), paddle.nn.LayerNorm(16), paddle.nn.GELU(), paddle.nn.Linear(16, 4)]
        self.model = paddle.nn.Sequential(*layers)
        self.schedule = paddle.optimizer.lr.StepDecay(0.01, 5)
        self.optimizer = paddle.optimizer.AdamW(parameters=self.model.parameters(), learning_rate=self.schedule)
        self.network = paddle.DataParallel(self.model)
        self.loss = 0.0

    def step(self, number: int) -> None:
        data = np.random.default_rng([number, paddle.distributed.get_rank()])
        inputs = paddle.to_tensor(data.standard_normal((6, 8), dtype=np.float32))
        loss = paddle.nn.functional.cross_entropy(self.network(inputs), paddle.to_tensor(data.integers(0, 4, 6)))
        loss.backward()
        if self.mortal:
            die(number, "before the update")
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.schedule.step()
        self.loss = float(loss)

    def digest(self) -> str:
        """Of all bits that the job's state consists of."""
        sum_ = hashlib.sha256()
        tensors = {**self.model.state_dict(), **self.optimizer.state_dict()}
        tensors = {name: one for name, one in tensors.items() if isinstance(one, paddle.Tensor)}
        for name in sorted(tensors):
            one = tensors[name]
            sum_.update(f"{name} {one.dtype} {one.shape}".encode() + one.numpy().tobytes())
        return sum_.hexdigest()


def main() -> None:
    init_parallel_env()
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    assert (rank, world) == (int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"]))
    if GENERATION == 0:  # without EDL
        with paddle.utils.unique_name.guard():  # so that the next one's parameters have the same names
            training = Training(mortal=False)
            for step in range(STEPS):
                training.step(step)
            say(calm=training.digest(), loss=training.loss)
    training = Training(mortal=True)
    state = PaddleState(model=training.model, optimizer=training.optimizer)
    with Checkpointer(state, interval_steps=1) as checkpointer:
        restored = checkpointer.restore()
        say(restored=restored)
        for step in range(restored + 1, STEPS):
            training.step(step)
            die(step, "before the save")
            checkpointer.save(step)
            die(step, "after the save")
        say(ended=training.digest(), loss=training.loss)
        paddle.distributed.barrier()
        if rank == 1:
            raise LookupError("the user's own mistake")
        paddle.distributed.barrier()


main()
