"""Real processes that are ranks of gloo groups of any size up to theirs, kept between tests since they start slowly."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TIMEOUT_S = 100.0  # the first call waits for the processes' imports


class RanksPool:
    """`size` processes; `run` calls a function in the first of them, as the ranks of one group."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "edl.collective.training.trainer"])
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size, str(folder / "store")), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(group, rank, world, *args)` in `world` ranks. Returns what each returned.

        Raises:
            AssertionError: it raised in some rank, or did not return in time.
        """
        for pipe in self._pipes[:world]:
            pipe.send_bytes(pickle.dumps((world, function, args)))
        waiting = list(self._pipes[:world])
        found: dict[Connection, tuple[bool, Any]] = {}
        while waiting:
            ready = wait(waiting, _TIMEOUT_S)
            assert ready, f"{len(waiting)} of {world} ranks did not answer within {_TIMEOUT_S} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[pipe] = pickle.loads(pipe.recv_bytes())
                waiting.remove(pipe)
        failures = [value for fine, value in found.values() if not fine]
        assert not failures, failures[0]
        return [found[pipe][1] for pipe in self._pipes[:world]]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups = {world: dist.new_group(list(range(world)), timeout=timeout) for world in range(1, size + 1)}
    while True:
        world, function, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, function(groups[world], rank, world, *args))
        except Exception:  # noqa: BLE001 - the test shows it
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))  # not `send`, which would share the tensors' memory
