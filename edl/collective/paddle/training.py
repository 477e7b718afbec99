"""Elastic training of PaddlePaddle scripts: the same slots, checkpoints and agents as for PyTorch.

::

    from edl.collective.paddle import Checkpointer, PaddleState, init_parallel_env

    init_parallel_env()
    state = PaddleState(model=model, optimizer=optimizer, sampler=sampler)
    checkpointer = Checkpointer(state)
    step = checkpointer.restore()

Trainers are restarted when a trainer comes or goes. State is the same on all trainers, as in data parallel training.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import paddle
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from edl.collective.checkpoint import checkpointer as checkpoint
from edl.collective.checkpoint.state.metadata import StateMetadata
from edl.collective.checkpoint.state.state import CapturedState, State, StateRestore
from edl.collective.paddle.fields import PaddleRng, unwrapped, wrapped
from edl.errors import SettingsError, TemporaryError
from edl.settings import read

__all__ = ["Checkpointer", "PaddleState", "init_parallel_env"]

_RNG: Final = "paddle_rng"
_TIMEOUT_S: Final = 300.0  # for trainers that import and start at different times
_POLL_S: Final = 0.02  # between two attempts to connect: a longer pause would add to every restart


def init_parallel_env(timeout_s: float = _TIMEOUT_S) -> None:
    """Call `paddle.distributed.init_parallel_env`, sooner, and get ready for `Checkpointer`. Collective.

    Paddle's own tries every 3 s to reach the first trainer, and so often makes a restart take that long.

    Args:
        timeout_s: how long to wait for the first trainer, in seconds.

    Raises:
        TemporaryError: the first trainer did not come in time.
    """
    master, rank = read("PADDLE_MASTER", str), read("PADDLE_TRAINER_ID", int)
    if master is not None and rank is not None and rank > 0 and not paddle.distributed.is_initialized():
        _wait_for(master, timeout_s)
    if _trainers() > 1:
        paddle.distributed.init_parallel_env()
    _join(timeout_s)


class PaddleState(State):
    """A `State` whose fields may also be Paddle's: layers, optimizers, learning rate schedulers and tensors."""

    def __init__(self, *, rng: bool = True, local: Iterable[str] = (), **fields: Any) -> None:
        """Make a state.

        Args:
            rng: also save the states of random number generators, Paddle's among them, of every trainer.
            local: names of fields that differ between trainers.
            **fields: what survives, by name.

        Raises:
            SettingsError: a field has a name that means something else here.
        """
        super().__init__(rng=rng, local=(*local, _RNG), **fields)
        if rng:
            setattr(self, _RNG, PaddleRng())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, wrapped(value))

    def __getattr__(self, name: str) -> Any:
        return unwrapped(super().__getattr__(name))

    def capture(self) -> CapturedState:
        """See `State.capture`.

        Returns:
            The state as it is now.

        Raises:
            SettingsError: trainers have not called `init_parallel_env`.
        """
        _check_joined()
        return super().capture()

    def begin_load(self, meta: StateMetadata, *, local: bool = True) -> StateRestore:
        """See `State.begin_load`.

        Args:
            meta: of the saved state.
            local: also restore `local` fields and random numbers.

        Returns:
            The restore under way.

        Raises:
            SettingsError: trainers have not called `init_parallel_env`.
        """
        _check_joined()
        return super().begin_load(meta, local=local)


class Checkpointer(checkpoint.Checkpointer):
    """A `edl.collective.Checkpointer` for Paddle's trainers, with the same arguments. Making it is collective.

    Args:
        state: what survives.
        **options: as of `edl.collective.Checkpointer`.

    Raises:
        SettingsError: trainers have not called `init_parallel_env`.
    """

    def __init__(self, state: State, **options: Any) -> None:
        _join(_TIMEOUT_S)
        super().__init__(state, **options)


def _trainers() -> int:
    return read("PADDLE_TRAINERS_NUM", int) or 1


def _check_joined() -> None:
    if _trainers() > 1 and not torch.distributed.is_initialized():
        raise SettingsError(
            f"{_trainers()} trainers would each restore by itself: use the Checkpointer of edl.collective.paddle"
        )


def _join(timeout_s: float) -> None:
    """Form the group of torch's in which trainers agree on checkpoints, and exchange them.

    It is on the host, beside Paddle's own, through which the first trainer tells where to meet.
    """
    if _trainers() == 1 or torch.distributed.is_initialized():
        return
    if not paddle.distributed.is_initialized():
        raise SettingsError("call edl.collective.paddle.training.init_parallel_env() before a Checkpointer is made")
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: Any = paddle.to_tensor([0 if server is None else server.port], dtype="int64")
    paddle.distributed.broadcast(port, 0)
    host = _endpoints()[0].rpartition(":")[0]
    store = server or TCPStore(host, port.item(), is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        "gloo", store=PrefixStore("edl", store), rank=rank, world_size=world, timeout=timeout
    )


def _endpoints() -> list[str]:
    return (read("PADDLE_TRAINER_ENDPOINTS", str) or "127.0.0.1:0").split(",")


def _wait_for(endpoint: str, timeout_s: float) -> None:
    """Wait until a process listens at an endpoint."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise TemporaryError(f"the first trainer, at {endpoint}, did not come in {timeout_s:g} s") from exc
            time.sleep(_POLL_S)
