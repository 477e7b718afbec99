"""Worlds of real processes for the tests of checkpoints: each rank runs one of the cases below over gloo.

A case returns something that JSON can say; digests stand for the bits of a state, whole tensors put together from their
shards.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State
from edl.errors import SettingsError
from tests.fast.collective.checkpoint import counted
from tests.jobs.collective.job import ROOT
from tests.jobs.forks import Forks

IMPORTS = """
import torch
import tests.jobs.collective.checkpoint.world

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what the first optimizer needs
"""
Case = Callable[..., Any]


@functools.cache
def _forks() -> Forks:
    forks = Forks(IMPORTS)
    atexit.register(forks.close)
    return forks


def run(
    size: int,
    case: str,
    folder: Path,
    *,
    slots: list[str] | None = None,
    replicas: list[str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `case` in a world of `size` ranks. Returns what each said.

    Args:
        slots: prefix of each rank's slots in `folder`; by default `slots-RANK`.
        replicas: each rank's folder for replicas in `folder`; by default there is none.
    """
    names = slots or [f"slots-{rank}" for rank in range(size)]
    told = {"size": size, "case": case, "folder": str(folder), "slots": names, "id": uuid.uuid4().hex, **arguments}
    told["replicas"] = replicas
    _forks().run(f"from {__name__} import run_world\nrun_world({told!r})", ROOT, folder / told["id"], os.environ)
    return [json.loads((folder / f"{told['id']}-{rank}").read_text()) for rank in range(size)]


def run_world(told: dict[str, Any]) -> None:
    """Fork the ranks of a world; all are killed if one fails."""
    children = []
    for rank in range(told["size"]):
        child = os.fork()
        if child == 0:
            os._exit(_rank(told, rank))
        children.append(child)
    for _ in range(told["size"]):
        if os.wait()[1]:
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)


def _rank(told: dict[str, Any], rank: int) -> int:
    told = dict(told)
    folder, case, identity, size = (told.pop(name) for name in ("folder", "case", "id", "size"))
    os.environ["EDL_SLOTS"] = str(Path(folder) / told.pop("slots")[rank])
    if (replicas := told.pop("replicas")) is not None:
        os.environ["EDL_REPLICAS"] = str(Path(folder) / replicas[rank])
    os.environ["EDL_GENERATION"] = str(told.pop("generation", 0))
    try:
        torch.manual_seed(100 + rank)
        store = dist.FileStore(f"{folder}/store-{identity}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result = CASES[case](**told)
        (Path(folder) / f"{identity}-{rank}").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the process ends here, and the parent shows it
        traceback.print_exc()
        return 1
    return 0


def digest(tensors: list[Any]) -> str:
    """Of the bits of tensors, whole ones put together from shards. Collective for sharded ones."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def job(kind: str, seed: int) -> Any:
    """A model of uneven sizes, wrapped as `kind` says, with AdamW and a scheduler, in a `State`."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 5, bias=False))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return State(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, history=[])


def train(state: Any, steps: int) -> None:
    """Some steps, the data of which depends on the rank."""
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.randn(8, 7)).square().mean().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.epoch += 1
        state.history = [*state.history, random.random()]
        moved = torch.tensor(state.history, dtype=torch.float64)
        dist.broadcast(moved, 0)
        state.history = moved.tolist()


def told_of(state: Any) -> dict[str, Any]:
    """What is to be the same on all ranks and after a restore."""
    optimizer = state.optimizer
    moments = [
        optimizer.state[parameter][key]
        for parameter in state.model.parameters()
        for key in sorted(optimizer.state[parameter])
    ]
    rate = [state.scheduler.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"]]
    return {
        "model": digest(list(state.model.parameters())),
        "buffers": digest(list(state.model.buffers())),
        "optimizer": digest(moments),
        "rest": [state.epoch, state.history, *rate],
    }


def save(kind: str, step: int = 4, storage: str | None = None) -> dict[str, Any]:
    """Train and save at `step`."""
    state = job(kind, 1)
    checkpointer = Checkpointer(state, storage=storage, interval_steps=1)
    train(state, 3)
    checkpointer.save(step - 1)
    train(state, 1)
    checkpointer.save(step, force=True)
    said = told_of(state)
    said["next"] = torch.rand(3).tolist()
    checkpointer.close()
    return said


def restore(kind: str, storage: str | None = None) -> dict[str, Any]:
    """Restore into a job that began otherwise."""
    assert counted.CountedFolder.protocol == "counted", "the storage's name is known"
    state, changes = job(kind, 2), []
    state.register_adjust_function(lambda change: changes.append([change.old_size, change.new_size, change.step]))
    with Checkpointer(state, storage=storage, interval_steps=1) as checkpointer:
        step = checkpointer.restore()
        said = {"step": step, "changes": changes, **(told_of(state) if step >= 0 else {})}
        said["next"] = torch.rand(3).tolist()
        if step >= 0:
            train(state, 1)
            checkpointer.save(step + 1)
        checkpointer.close()  # the end of the block would store that
    return said


def resume(kind: str, steps: int) -> dict[str, Any]:
    """Restore, or begin, and train some more steps, each of which is saved, the third one for a replica."""
    state, states = job(kind, 2), {}
    with Checkpointer(state, interval_steps=1) as checkpointer:
        first = checkpointer.restore() + 1
        for step in range(first, first + steps):
            train(state, 1)
            checkpointer.save(step)
            states[str(step)] = told_of(state)
    return {"first": first, "states": states, "next": torch.rand(3).tolist()}


def dcp_load(kind: str, checkpoint: str) -> dict[str, Any]:
    """Load as a user of `torch.distributed.checkpoint` would, who knows nothing of EDL."""
    state = job(kind, 2)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    loaded = {"model": model, "optimizer": optimizer}
    dcp.load(loaded, checkpoint_id=checkpoint)
    set_state_dict(state.model, state.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    said = told_of(state)
    return {key: said[key] for key in ("model", "optimizer")}


class Averages:
    """Averaged weights, which are there after the first step only."""

    def __init__(self) -> None:
        self.shadow: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": list(self.shadow), "nested": [{"again": tuple(self.shadow[:1])}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]
        (self.first,) = state["nested"][0]["again"] or (None,)


def averages(step: int, lost_mesh: bool = False) -> dict[str, Any]:
    """Restore, or begin, a sharded job that clones its weights in the first step, and save it at `step`."""
    whole = job("fsdp", 1)
    state = State(averages=Averages(), values=None) if lost_mesh else whole
    state.averages, state.values = Averages(), None
    with Checkpointer(state, interval_steps=1) as checkpointer:
        first = checkpointer.restore()
        if first < 0:
            weights = [one.detach().clone() for one in whole.model.parameters()]
            state.averages.shadow = [2 * one for one in weights]
            state.values = {"deep": [(weights[0], None)], 3: weights[1].to(torch.bfloat16), "count": torch.tensor(7)}
            try:
                checkpointer.save(step)
            except SettingsError as exc:
                return {"refused": str(exc)}
        sharded = [*state.averages.shadow, state.values["deep"][0][0], state.values[3]]
        said = {"first": first, "bits": digest([*sharded, state.values["count"]])}
        said["placed"] = [str(one.placements) for one in sharded]
        state.values["deep"][0][0].add_(whole.model[0].weight.detach())  # on the same mesh, or torch refuses it
        checkpointer.close()
    return said


CASES: dict[str, Case] = {
    "averages": averages,
    "save": save,
    "restore": restore,
    "resume": resume,
    "dcp_load": dcp_load,
}
