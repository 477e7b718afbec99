"""A training job that goes on in process: `python train.py FOLDER STEPS STEP_S [TRAIT ...]`.

After each step a rank appends a line of JSON to FOLDER/PID.jsonl: when, in which generation, as which rank, which step,
a hash of the parameters, and what the process holds. The data of a step depends on its number alone, and is shared out
over however many ranks there are. Traits make it misbehave.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.evaluator import Evaluator
from edl.collective.checkpoint.state.state import State
from edl.collective.inprocess.run_in_process import Place, run_in_process

GLOBAL_BATCH = 24


def held() -> dict[str, int]:
    """What a leak would show in."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    fds, threads = (len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))
    return {"fds": fds, "resident": resident, "threads": threads}


def evaluate(folder: Path, losses: int) -> int:
    """Say which state is evaluated; the first time rank 1 is killed in the middle."""
    with (folder / "evaluations").open("a") as file:
        file.write(f"{losses}\n")
    if dist.get_rank() == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main(folder: str, steps: int, step_s: float, traits: set[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = State(model=model, optimizer=optimizer, losses=0, sizes=[])
    state.register_adjust_function(lambda change: state.sizes.append([change.old_size, change.new_size]))
    checkpointer = Checkpointer(state, interval_steps=1_000_000 if "unsaved" in traits else None)
    diary = Path(folder, f"{os.getpid()}.jsonl")
    first = int(os.environ.get("EDL_GENERATION", "0"))
    evaluator = Evaluator(lambda: evaluate(Path(folder), state.losses), limit_s=60.0)
    if "evaluates" in traits:
        state.evaluator = evaluator

    def train(place: Place) -> None:
        # So that buckets are not laid out anew after the first step: sums of three have another rounding then.
        module = DistributedDataParallel(model, find_unused_parameters=True)
        for step in range(place.step + 1, steps):
            rows = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
            mine = rows.tensor_split(place.size)[place.rank]
            loss = (module(mine) - mine.flip(1)).square().mean() * len(mine) * place.size / GLOBAL_BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.losses += 1
            if "late" in traits:
                dist.all_reduce(loss.detach())
            if "wrong" in traits and step == 5 and place.rank == 1:
                raise ValueError("this batch is no good")
            time.sleep(step_s)
            parameters = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            line = {
                "at": time.monotonic(),
                "first": first,
                "generation": place.generation,
                "rank": place.rank,
                "size": place.size,
                "step": step,
                "hash": hashlib.sha256(parameters).hexdigest()[:16],
                "losses": state.losses,
                "sizes": state.sizes,
                **held(),
            }
            with diary.open("a") as file:
                file.write(json.dumps(line) + "\n")
            checkpointer.save(step)
            if "evaluates" in traits and step == 5:
                checkpointer.evaluate(evaluator)
        if "evaluates" in traits:
            Path(folder, f"{os.getpid()}.results").write_text(f"{evaluator.results} {evaluator.pending}")

    def cling(place: Place) -> None:
        try:
            train(place)
        except BaseException:
            if place.rank == 1:
                time.sleep(3600)
            raise

    # No wait ends by these limits: who is lost is noticed, and on a busy machine who is slow is not.
    limits = {"timeout_s": 120.0, "patience_s": 120.0}
    run_in_process(cling if "clings" in traits else train, state=state, checkpointer=checkpointer, **limits)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s", stream=sys.stderr)
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), set(sys.argv[4:]))
