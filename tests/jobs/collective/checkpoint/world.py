"""Worlds of real processes for the tests of checkpoints: each rank runs one of the cases below over gloo.

`run` has the ranks forked from a process that has imported torch, which is the same for all tests of a test process. A
case returns something that JSON can say; digests stand for the bits of a state, whole tensors put together from their
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
import select
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
START_S = 150.0  # importing torch, while other tests do as well
TIMEOUT_S = 90.0
_NUMBER = 12  # bytes of an answer: a process id, or an exit status
Case = Callable[..., Any]


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
    told["environ"] = dict(os.environ)
    status = _server().run(told)
    assert status == 0, f"{case}: {status}\n{(folder / told['id']).read_text(errors='replace')}"
    return [json.loads((folder / f"{told['id']}-{rank}").read_text()) for rank in range(size)]


class _Server:
    """The process that worlds are forked from, one at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` knows nothing of bytes in a buffer of ours
            start_new_session=True,  # Ctrl-C is for the tests
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self.close)
        self._answer(time.monotonic() + START_S)

    def run(self, told: dict[str, Any]) -> int:
        """Run a world, which has a process group of its own. Returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told).encode() + b"\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + TIMEOUT_S
        group = self._answer(deadline)
        try:
            return self._answer(deadline)
        except TimeoutError:
            os.killpg(group, signal.SIGKILL)
            self._answer(time.monotonic() + TIMEOUT_S)
            raise

    def _answer(self, deadline: float) -> int:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no answer of the process that worlds are forked from: {self.process.poll()=}")
        return int(self.process.stdout.read(_NUMBER))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def main() -> None:
    """Fork a world for each line of standard input. Answer with its process group, and then with its exit status."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what the first optimizer needs
    os.write(1, b"%*d" % (_NUMBER, 0))
    for line in sys.stdin:
        told = json.loads(line)
        world = os.fork()
        if world == 0:
            os.setsid()
            os._exit(_world(told))
        os.write(1, b"%*d" % (_NUMBER, world))
        os.write(1, b"%*d" % (_NUMBER, os.waitpid(world, 0)[1]))


def _world(told: dict[str, Any]) -> int:
    output = os.open(Path(told["folder"]) / told["id"], os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(told.pop("environ"))
    children = []
    for rank in range(told["size"]):
        child = os.fork()
        if child == 0:
            os._exit(_rank(told, rank))
        children.append(child)
    codes = []
    for _ in children:
        child, status = os.wait()
        codes.append(status)
        if status:
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return int(any(codes))


def _rank(told: dict[str, Any], rank: int) -> int:
    import torch
    import torch.distributed as dist

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
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def job(kind: str, seed: int) -> Any:
    """A model of uneven sizes, wrapped as `kind` says, with AdamW and a scheduler, in a `State`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from edl.collective.checkpoint.state.state import State

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
    import torch
    import torch.distributed as dist

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
    buffers = [] if not list(state.model.buffers()) else list(state.model.buffers())
    return {
        "model": digest(list(state.model.parameters())),
        "buffers": digest(buffers),
        "optimizer": digest(moments),
        "rest": [
            state.epoch,
            state.history,
            state.scheduler.state_dict()["last_epoch"],
            optimizer.param_groups[0]["lr"],
        ],
    }


def save(kind: str, step: int = 4, storage: str | None = None, close: bool = True) -> dict[str, Any]:
    """Train and save at `step`."""
    import torch

    from edl.collective.checkpoint.checkpointer import Checkpointer

    state = job(kind, 1)
    checkpointer = Checkpointer(state, storage=storage, interval_steps=1)
    train(state, 3)
    checkpointer.save(step - 1)
    train(state, 1)
    checkpointer.save(step, force=True)
    said = told_of(state)
    said["next"] = torch.rand(3).tolist()
    if close:
        checkpointer.close()
    return said


def restore(kind: str, storage: str | None = None) -> dict[str, Any]:
    """Restore into a job that began otherwise."""
    import torch

    from edl.collective.checkpoint.checkpointer import Checkpointer
    from tests.fast.collective.checkpoint import counted

    assert counted.CountedFolder.protocol == "counted", "the storage's name is known"
    state, changes = job(kind, 2), []
    state.register_adjust_function(lambda change: changes.append([change.old_size, change.new_size, change.step]))
    with Checkpointer(state, storage=storage, interval_steps=1) as checkpointer:
        step = checkpointer.restore()
        said = {
            "step": step,
            "changes": changes,
            **(told_of(state) if step >= 0 else {}),
            "next": torch.rand(3).tolist(),
        }
        if step >= 0:
            train(state, 1)
            checkpointer.save(step + 1)
        checkpointer.close()  # the end of the block would store that
    return said


def resume(kind: str, steps: int) -> dict[str, Any]:
    """Restore, or begin, and train some more steps, each of which is saved, the third one for a replica."""
    import torch

    from edl.collective.checkpoint.checkpointer import Checkpointer

    state, states = job(kind, 2), {}
    with Checkpointer(state, interval_steps=1) as checkpointer:
        first = checkpointer.restore() + 1
        for step in range(first, first + steps):
            train(state, 1)
            checkpointer.save(step)
            states[str(step)] = told_of(state)
    return {"first": first, "states": states, "next": torch.rand(3).tolist()}


class Slow:
    """A field that takes so many seconds to be saved."""

    seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def waits(late: int, slow: int, seconds: float) -> list[dict[str, float]]:
    """Rank `late` comes later to one save than the others, rank `slow` takes longer for the next one.

    What each of the two saves took, by phase.
    """
    import torch.distributed as dist

    from edl.collective.checkpoint.checkpointer import Checkpointer
    from edl.collective.checkpoint.state.state import State
    from edl.collective.worker_status import Phase, WorkerStatusPage

    board, field, rank, taken = WorkerStatusPage.from_env(), Slow(), dist.get_rank(), []
    with Checkpointer(State(field=field), interval_steps=1, board=board) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0)
        for step in (1, 2):
            dist.barrier()
            if step == 1 and rank == late:
                time.sleep(seconds)
            field.seconds = seconds if step == 2 and rank == slow else 0.0
            before = board.read_status().totals_s
            checkpointer.save(step)
            after = board.read_status().totals_s
            field.seconds = 0.0
            taken.append({phase.name: after[phase] - before[phase] for phase in Phase})
    return taken


def broadcast(kind: str) -> dict[str, Any]:
    """Everybody gets the live state of rank 1."""
    import torch
    import torch.distributed as dist

    from edl.collective.checkpoint.memory.transfer import broadcast_state

    state = job(kind, 7 + dist.get_rank())
    if dist.get_rank() == 1:
        for _ in range(2):
            state.model(torch.randn(8, 7)).sum().backward()
            state.optimizer.step()
        state.epoch = 11
    broadcast_state(state, 1)
    return told_of(state)


def broadcast_refused(kind: str) -> str:
    """Nobody has all of it. What is raised, which must be the same on all ranks."""
    from edl.collective.checkpoint.memory.transfer import broadcast_state
    from edl.errors import SettingsError

    try:
        broadcast_state(job(kind, 7), 1)
    except SettingsError as exc:
        return str(exc)
    return ""


def dcp_load(kind: str, checkpoint: str) -> dict[str, Any]:
    """Load as a user of `torch.distributed.checkpoint` would, who knows nothing of EDL."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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
    import torch

    from edl.collective.checkpoint.checkpointer import Checkpointer
    from edl.collective.checkpoint.state.state import State
    from edl.errors import SettingsError

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
    "waits": waits,
    "broadcast": broadcast,
    "broadcast_refused": broadcast_refused,
    "dcp_load": dcp_load,
}

if __name__ == "__main__":
    main()
