"""The script of the tests' Paddle jobs: a small net, trained on data that depend on the step and the rank only.

The environment says when a trainer kills itself: `KILLS` is JSON, a list of `[generation, rank, step, where]`; and in
which step, `RAISES`, the second trainer raises. With `END` given, the script ends when that file is there, else after
`STEPS` steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of paddle's own imports
    import paddle

import numpy as np

from edl.collective.paddle import Checkpointer, PaddleState, init_parallel_env

GENERATION = int(os.environ["EDL_GENERATION"])
KILLS = [tuple(kill) for kill in json.loads(os.environ.get("KILLS", "[]"))]
STEPS = int(os.environ.get("STEPS", "0"))
RAISES = int(os.environ.get("RAISES", "-1"))
END = Path(os.environ.get("END", "nowhere"))


def say(**what: Any) -> None:
    """One line, which the test reads."""
    what |= {"generation": GENERATION, "rank": paddle.distributed.get_rank()}
    log = os.open("said.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, json.dumps(what).encode() + b"\n")
    os.close(log)


def die(step: int, where: str) -> None:
    if (GENERATION, paddle.distributed.get_rank(), step, where) in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: Any, optimizer: Any) -> str:
    """Of all bits that the job's state consists of."""
    sum_ = hashlib.sha256()
    tensors = {**model.state_dict(), **optimizer.state_dict()}
    tensors = {name: one for name, one in tensors.items() if isinstance(one, paddle.Tensor)}
    for name in sorted(tensors):
        sum_.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode() + tensors[name].numpy().tobytes())
    return sum_.hexdigest()


def main() -> None:
    init_parallel_env()
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    assert (rank, world) == (int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"]))
    paddle.seed(1)
    model = paddle.nn.Sequential(
        paddle.nn.Linear(8, 16), paddle.nn.LayerNorm(16), paddle.nn.GELU(), paddle.nn.Linear(16, 4)
    )
    schedule = paddle.optimizer.lr.StepDecay(0.01, 5)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), learning_rate=schedule)
    network = paddle.DataParallel(model) if world > 1 else model
    with Checkpointer(PaddleState(model=model, optimizer=optimizer), interval_steps=1) as checkpointer:
        step = checkpointer.restore()
        say(restored=step, world=world, digest=digest(model, optimizer))
        while not END.exists() and (not STEPS or step + 1 < STEPS):
            step += 1
            data = np.random.default_rng([step, rank])
            inputs = paddle.to_tensor(data.standard_normal((6, 8), dtype=np.float32))
            loss = paddle.nn.functional.cross_entropy(network(inputs), paddle.to_tensor(data.integers(0, 4, 6)))
            if step == RAISES and rank == 1:
                raise LookupError("the user's own mistake")
            loss.backward()
            die(step, "before the update")
            optimizer.step()
            optimizer.clear_grad()
            schedule.step()
            die(step, "before the save")
            checkpointer.save(step)
            say(finished=step, world=world)
            die(step, "after the save")
            if not STEPS:
                time.sleep(0.02)
        say(ended=step, digest=digest(model, optimizer), loss=float(loss))


main()
