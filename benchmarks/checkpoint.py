"""How long a save of about 500 MB blocks the training loop: EDL, `torch.save` with fsync, and DCP's `async_save`.

A model trains with AdamW on the CPU and saves after each update. The blocked time is the duration of the call plus the
next update's wait. `save and pass` also includes how much the copy slows the next pass.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.state import State

GOALS = [Goal("vs_torch_save", 10), Goal("vs_dcp_in_call", 1), Goal("slow_storage", 1.5, "at most")]
_FEATURES = {False: 2048, True: 256}
_LAYERS = 10
_SAVES = 3
_RATE = 100e6
_STARTS_WITHIN_S = 60.0
_ROWS = {False: 32, True: 4}
_STORING = "edl, storing at 100 MB/s"
_SURVIVES = {
    "edl": "the process; with a replica, also the host",
    _STORING: "the process; once the save is stored, also the host",
    "torch.save": "the process and the host",
    "dcp, staging in the call": "neither; once the save is synced, both",
    "dcp, staging in a thread": "neither; once the save is synced, both",
}


class Cost(NamedTuple):
    """Seconds of one save: how long training stood still, and how much longer save and pass took than a pass alone."""

    blocked: float
    longer: float


class Throttled(LocalFileSystem):  # type: ignore[misc]
    """A local folder that accepts 100 MB/s."""

    protocol = "slow"
    rate = _RATE

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))
        return stripped

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        file = super()._open(path, mode=mode, block_size=block_size, **options)
        if "w" in mode:
            write = file.write

            def slowly(data: Any) -> Any:
                time.sleep(memoryview(data).nbytes / self.rate)
                return write(data)

            file.write = slowly
        return file


def job(quick: bool) -> State:
    """Return a model and its optimizer with allocated moments, at 12 bytes per parameter."""
    size = _FEATURES[quick]
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return State(model=model, optimizer=optimizer)


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    torch.set_num_threads(1)
    loop = Loop(job(options.quick), options.quick)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        sides = {
            "edl": stack.enter_context(_edl(loop)),
            _STORING: stack.enter_context(_storing(loop, folder / "slow")),
            "torch.save": _torch_save(loop, folder / "torch"),
            "dcp, staging in the call": stack.enter_context(_dcp(loop, folder, threaded=False)),
            "dcp, staging in a thread": stack.enter_context(_dcp(loop, folder, threaded=True)),
        }
        rounds = take_turns(sides, options.repeats)
    survives = "once training continues, a save survives the loss of"
    note(f"| side | blocked, ms | save and pass minus a pass, ms | {survives} |")
    note("| --- | ---: | ---: | --- |")
    for name, costs in rounds.items():
        blocking, longer = (_milliseconds(list(column)) for column in zip(*costs, strict=True))
        note(f"| {name} | {blocking} | {longer} | {_SURVIVES[name]} |")
    note("")
    blocked = {name: [cost.blocked for cost in costs] for name, costs in rounds.items()}
    ours = blocked["edl"]
    return {
        "vs_torch_save": divide(blocked["torch.save"], ours),
        "vs_dcp_in_call": divide(blocked["dcp, staging in the call"], ours),
        "vs_dcp_in_thread": divide(blocked["dcp, staging in a thread"], ours),
        "slow_storage": divide(blocked[_STORING], ours),
    }


def _milliseconds(seconds: list[float]) -> str:
    return str(Spread.of([1e3 * value for value in seconds]))


class Loop:
    """A training loop whose steps are timed one by one."""

    def __init__(self, state: State, quick: bool) -> None:
        self.state = state
        self._inputs = torch.randn(_ROWS[quick], _FEATURES[quick])
        self._passes: list[float] = []
        for _ in range(5):
            self._pass()

    def step(self, save: Callable[[], object], wait: Callable[[], object] = lambda: True) -> Cost:
        """Update, save, make a pass, and wait until the next update is allowed. A skipped save is an error."""
        self.state.optimizer.step()
        begin = time.perf_counter()
        saved = save()
        passing = time.perf_counter()
        self._pass()
        waiting = time.perf_counter()
        if not (saved and wait()):
            raise RuntimeError("a save was skipped")
        end = time.perf_counter()
        usual = statistics.median(self._pass() for _ in range(3))
        return Cost(passing - begin + end - waiting, end - begin - usual)

    def steps(self, step: Callable[[], Cost]) -> Cost:
        """Return the medians over some steps."""
        costs = [step() for _ in range(_SAVES)]
        return Cost(*(statistics.median(values) for values in zip(*costs, strict=True)))

    def _pass(self) -> float:
        begin = time.perf_counter()
        self.state.model(self._inputs).square().mean().backward()
        return time.perf_counter() - begin


@contextlib.contextmanager
def _edl(loop: Loop) -> Iterator[Callable[[], Cost]]:
    with Checkpointer(loop.state, interval_steps=1) as checkpointer:
        steps = itertools.count()

        def step() -> Cost:
            return loop.step(lambda: checkpointer.save(next(steps)))

        for _ in range(3):  # the first saves allocate memory
            step()
        yield lambda: loop.steps(step)


def _torch_save(loop: Loop, path: Path) -> Callable[[], Cost]:
    state = loop.state

    def save() -> bool:
        with path.open("wb") as file:
            torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return True

    return lambda: loop.steps(lambda: loop.step(save))


@contextlib.contextmanager
def _dcp(loop: Loop, folder: Path, *, threaded: bool) -> Iterator[Callable[[], Cost]]:
    state = loop.state
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=threaded, use_non_blocking_copy=False
        )
    )

    def step() -> Cost:
        saving: list[Any] = []

        def save() -> bool:
            content = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
            saving.append(async_save(content, checkpoint_id=folder / f"dcp-{threaded}", async_stager=stager))
            return True

        def wait() -> bool:
            if threaded:
                saving[0].staging_completion.result()
            return True

        cost = loop.step(save, wait)
        getattr(saving[0], "upload_completion", saving[0]).result()
        return cost

    try:
        with warnings.catch_warnings(action="ignore"):
            for _ in range(2):
                step()
            yield lambda: loop.steps(step)
    finally:
        stager.close()


@contextlib.contextmanager
def _storing(loop: Loop, folder: Path) -> Iterator[Callable[[], Cost]]:
    """Time saves while an earlier one is being stored."""
    fsspec.register_implementation(Throttled.protocol, Throttled, clobber=True)

    def steps() -> Cost:
        url = f"{Throttled.protocol}://{folder}"
        checkpointer = Checkpointer(loop.state, interval_steps=1, storage=url, keep=1)
        with contextlib.closing(checkpointer):
            numbers = itertools.count()

            def step() -> Cost:
                return loop.step(lambda: checkpointer.save(next(numbers)))

            for _ in range(2):
                step()
            checkpointer.save(next(numbers), force=True)
            _wait_for(folder, "step-2.g-*/__0_0.distcp")  # this one is stored during the next saves
            cost = loop.steps(step)
        shutil.rmtree(folder)
        return cost

    yield steps


def _wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while not any(folder.glob(pattern)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{pattern} did not appear within {_STARTS_WITHIN_S:.0f} s")
        time.sleep(0.001)


if __name__ == "__main__":
    main("checkpoint", measure, GOALS, __doc__)
