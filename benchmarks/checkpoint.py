"""How long a save of about 500 MB blocks the training loop: EDL, `torch.save` with fsync, and DCP's `async_save`.

A model with AdamW's moments, in one process. Between a save and the next update of the parameters 100 ms are slept, in
place of a GPU's forward and backward pass; what the save call takes, and what the update then has still to wait for,
is counted, and whatever happens in the background afterwards is not. EDL copies into shared memory that was set up by
earlier saves. So does DCP (`DefaultStager` with `use_shared_memory`), staging in the call (`vs_dcp_async`), or in a
thread (`vs_dcp_thread`), for which torch's documentation demands a GPU and which nothing keeps from copying what an
update has changed already. `slow_storage` is EDL's own blocking time while a checkpoint is being written at 100 MB/s,
divided by the same without that limit.
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
from functools import partial
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state import State

GOALS = [Goal("vs_torch_save", 10), Goal("vs_dcp_async", 2), Goal("slow_storage", 1.5, "at most")]
_FEATURES = {False: 2048, True: 256}
_LAYERS = 10
_SAVES = 3
_RATE = 100e6
_STARTS_WITHIN_S = 60.0
_PASS_S = 0.1


class Throttled(LocalFileSystem):  # type: ignore[misc]
    """A local folder that takes 100 MB/s."""

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


class Unthrottled(Throttled):
    """The same without the limit."""

    protocol = "fast"
    rate = float("inf")


def job(quick: bool) -> State:
    """A model and its optimizer, with moments in place: 12 bytes a parameter."""
    size = _FEATURES[quick]
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return State(model=model, optimizer=optimizer)


def measure(options: Options) -> dict[str, list[float]]:
    """The ratios of every round."""
    state = job(options.quick)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        sides = {
            "edl": stack.enter_context(_edl(state)),
            "torch.save": _torch_save(state, folder / "torch"),
            "dcp, staging in the call": stack.enter_context(_dcp(state, folder, threaded=False)),
            "dcp, staging in a thread": stack.enter_context(_dcp(state, folder, threaded=True)),
        }
        rounds = take_turns(sides, options.repeats)
        storage = {
            kind.protocol: stack.enter_context(_storing(state, folder / kind.protocol, kind))
            for kind in (Unthrottled, Throttled)
        }
        stored = take_turns(storage, options.repeats)
    megabytes = state.capture().data_nbytes / 1e6
    note(f"State: {megabytes:.0f} MB. Seconds that a save blocks:\n")
    for name, seconds in {**rounds, "edl, storing": stored["fast"], "edl, storing at 100 MB/s": stored["slow"]}.items():
        note(f"- {name}: {Spread.of(seconds)}")
    note("")
    return {
        "vs_torch_save": divide(rounds["torch.save"], rounds["edl"]),
        "vs_dcp_async": divide(rounds["dcp, staging in the call"], rounds["edl"]),
        "vs_dcp_thread": divide(rounds["dcp, staging in a thread"], rounds["edl"]),
        "slow_storage": divide(stored["slow"], stored["fast"]),
    }


def _timed(state: State, save: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of a save, and of what an update of the parameters has to wait for after a forward and backward pass."""
    state.optimizer.step()
    begin = time.perf_counter()
    save()
    saved = time.perf_counter()
    time.sleep(_PASS_S)
    updating = time.perf_counter()
    wait()
    return saved - begin + time.perf_counter() - updating


@contextlib.contextmanager
def _edl(state: State) -> Iterator[Callable[[], float]]:
    with Checkpointer(state, interval_steps=1) as checkpointer:
        steps = itertools.count()
        for step in itertools.islice(steps, 2):
            checkpointer.save(step)

        def save() -> bool:
            return checkpointer.save(next(steps))

        yield lambda: statistics.median(_timed(state, save, checkpointer.wait_until_finished) for _ in range(_SAVES))


def _torch_save(state: State, path: Path) -> Callable[[], float]:
    def save() -> None:
        with path.open("wb") as file:
            torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    return lambda: statistics.median(_timed(state, save) for _ in range(_SAVES))


@contextlib.contextmanager
def _dcp(state: State, folder: Path, *, threaded: bool) -> Iterator[Callable[[], float]]:
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=threaded, use_non_blocking_copy=False
        )
    )

    def save() -> float:
        saving: list[Any] = []
        content = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        blocked = _timed(
            state,
            lambda: saving.append(async_save(content, checkpoint_id=folder / f"dcp-{threaded}", async_stager=stager)),
            lambda: saving[0].staging_completion.result() if threaded else None,
        )
        getattr(saving[0], "upload_completion", saving[0]).result()
        return blocked

    try:
        with warnings.catch_warnings(action="ignore"):
            save()
            yield lambda: statistics.median(save() for _ in range(_SAVES))
    finally:
        stager.close()


@contextlib.contextmanager
def _storing(state: State, folder: Path, kind: type[Throttled]) -> Iterator[Callable[[], float]]:
    """Saves while an earlier one is being stored."""
    fsspec.register_implementation(kind.protocol, kind, clobber=True)

    def save() -> float:
        url = f"{kind.protocol}://{folder}"
        with Checkpointer(state, interval_steps=1, storage=url, keep=1) as checkpointer:
            checkpointer.save(0)
            checkpointer.save(1, force=True)
            _wait_for(folder, "step-1.g-*/__0_0.distcp")  # stored while the next are saved
            finished = checkpointer.wait_until_finished
            seconds = [_timed(state, partial(checkpointer.save, 2 + number), finished) for number in range(_SAVES)]
        shutil.rmtree(folder)
        return statistics.median(seconds)

    yield save


def _wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while not any(folder.glob(pattern)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{pattern} was not begun within {_STARTS_WITHIN_S:.0f} s")
        time.sleep(0.001)


if __name__ == "__main__":
    main("checkpoint", measure, GOALS, __doc__)
