"""Elastic training in PaddlePaddle scripts, with the same slots, checkpoints and agents as for PyTorch.

All trainers are restarted when a trainer joins or leaves. The state is the same on all trainers, as in data parallel
training.

A Paddle tensor in host memory and a torch tensor can share memory (DLPack), so no copy is made when tensors are passed
to torch for a save. During a restore, Paddle copies into its existing tensors.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

import paddle
import torch
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from edl.collective.checkpoint import checkpointer as checkpoint
from edl.collective.checkpoint.state.state import State
from edl.errors import SettingsError, TemporaryError
from edl.settings import read


def wrapped(value: Any) -> Any:
    """Wrap a Paddle object so that its `state_dict` returns torch tensors; return other objects unchanged."""
    if isinstance(value, paddle.nn.Layer):
        return _Layer(value)
    if isinstance(value, paddle.optimizer.Optimizer):
        return _Optimizer(value)
    if isinstance(value, paddle.optimizer.lr.LRScheduler):
        return _Scheduler(value)
    if isinstance(value, paddle.Tensor):
        return _Tensor(value)
    return value


def unwrapped(value: Any) -> Any:
    """Return the object inside a wrapper that `wrapped` made; return other objects unchanged."""
    return value.inner if isinstance(value, _Wrapped) else value


class _Wrapped:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class _Layer(_Wrapped):
    """Parameters and buffers by their names in the layer, whether or not `DataParallel` wraps the layer."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: _as_torch(tensor, name) for name, tensor in self.inner.state_dict().items()}

    def load_state_dict(self, form: Mapping[str, torch.Tensor]) -> None:
        live = self.inner.state_dict()
        odd = sorted(live.keys() ^ form.keys())
        if odd:
            raise SettingsError(f"the saved state does not fit the layer: one of the two lacks {', '.join(odd[:5])}")
        for name, saved in form.items():
            _put(live[name], saved, name)


class _Tensor(_Wrapped):
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": _as_torch(self.inner, self.inner.name)}

    def load_state_dict(self, form: Mapping[str, torch.Tensor]) -> None:
        _put(self.inner, form["value"], self.inner.name)


class _Scheduler(_Wrapped):
    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner.state_dict())

    def load_state_dict(self, form: dict[str, Any]) -> None:
        self.inner.set_state_dict(form)


class _Optimizer(_Wrapped):
    """Accumulators and master weights by Paddle's names, and the learning rate schedule.

    The names depend on the order in which layers are created. That order must always be the same, as for `paddle.load`.
    """

    def state_dict(self) -> dict[str, Any]:
        form = dict(self.inner.state_dict())
        schedule = form.pop("LR_Scheduler", None)
        masters = form.pop("master_weights", {})
        return {
            "accumulators": {name: _as_torch(tensor, name) for name, tensor in form.items()},
            # Accumulators are named after the master weights, if there are any, so these must keep their names.
            "masters": {name: [tensor.name, _as_torch(tensor, tensor.name)] for name, tensor in masters.items()},
            "schedule": schedule,
        }

    def load_state_dict(self, form: Mapping[str, Any]) -> None:
        parameters = [parameter.name for parameter in self.inner._parameter_list]
        for name in (*form["accumulators"], *form["masters"]):
            if not any(name.startswith(parameter) for parameter in parameters):
                raise SettingsError(
                    f"the optimizer's saved state has {name}, but the optimizer has no such parameter: create the "
                    "layers in the order in which they were created before the save"
                )
        mine: dict[str, Any] = {name: _as_paddle(tensor, name) for name, tensor in form["accumulators"].items()}
        if form["masters"]:
            mine["master_weights"] = {name: _as_paddle(tensor, own) for name, (own, tensor) in form["masters"].items()}
        if form["schedule"] is not None:
            mine["LR_Scheduler"] = form["schedule"]
        try:
            self.inner.set_state_dict(mine)
        except AssertionError as exc:
            raise SettingsError(f"the saved state does not fit the optimizer: {exc}") from exc


class PaddleRng:
    """State of Paddle's random number generators on the host and on the current device."""

    def state_dict(self) -> dict[str, list[Any]]:
        return {device: [_taken(state) for state in paddle.get_rng_state(device)] for device in self._devices()}

    def load_state_dict(self, form: Mapping[str, list[Any]]) -> None:
        for device in self._devices():
            saved = form.get(device, [])
            made = [_made(now, state) for now, state in zip(paddle.get_rng_state(device), saved, strict=False)]
            if made:
                paddle.set_rng_state(made, device)

    def _devices(self) -> list[str]:
        return list(dict.fromkeys(["cpu", paddle.device.get_device().partition(":")[0]]))


def _taken(state: Any) -> tuple[int, int, int, bytes]:
    """Return a generator's state as plain values, the same values that Paddle pickles."""
    device, seed, offset, engine = state.__getstate__()
    return device, seed, offset, bytes(engine)  # the engine is text, given as a list of its characters


def _made(like: Any, taken: tuple[int, int, int, bytes]) -> Any:
    device, seed, offset, engine = taken
    state = like.__new__(type(like))
    state.__setstate__((device, seed, offset, list(engine)))
    return state


def _as_torch(tensor: Any, name: str) -> torch.Tensor:
    """Return a torch tensor that shares the tensor's memory or, if on another device, a copy in host memory."""
    if tensor.is_dist():
        raise SettingsError(f"{name} is distributed over several trainers: only whole tensors can be saved")
    if not tensor.place.is_cpu_place():
        tensor = tensor.cpu()
    return torch.utils.dlpack.from_dlpack(tensor.detach())


def _as_paddle(tensor: Any, name: str) -> Any:
    made = paddle.utils.dlpack.from_dlpack(tensor)
    made.name = name
    return made


def _put(live: Any, saved: torch.Tensor, name: str) -> None:
    kinds = [str(tensor.dtype).rpartition(".")[2] for tensor in (saved, live)]
    shapes = [tuple(saved.shape), tuple(live.shape)]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        raise SettingsError(f"{name} was saved as {kinds[0]}{shapes[0]}, but is now {kinds[1]}{shapes[1]}")
    live.set_value(_as_paddle(saved, name))


_RNG: Final = "paddle_rng"
_TIMEOUT_S: Final = 300.0  # enough for trainers whose imports and starts take different times
_POLL_S: Final = 0.02  # between two attempts to connect: a longer pause would delay every restart


def init_parallel_env(timeout_s: float = _TIMEOUT_S) -> None:
    """Call `paddle.distributed.init_parallel_env` without its delay, and set up what `Checkpointer` needs. Collective.

    Paddle's own function tries to reach the first trainer only every 3 s, so a restart often takes that long. This
    function calls Paddle's as soon as the first trainer listens.

    Args:
        timeout_s: Seconds to wait for the first trainer.

    Raises:
        TemporaryError: The first trainer did not start in time.
    """
    master, rank = read("PADDLE_MASTER", str), read("PADDLE_TRAINER_ID", int)
    if master is not None and rank is not None and rank > 0 and not paddle.distributed.is_initialized():
        _wait_for(master, timeout_s)
    if _trainers() > 1:
        paddle.distributed.init_parallel_env()
    _join(timeout_s)


class PaddleState(State):
    """A `State` whose fields may also be Paddle's layers, optimizers, learning rate schedulers and tensors."""

    def __init__(self, *, rng: bool = True, local: Iterable[str] = (), **fields: Any) -> None:
        """Create a state.

        Args:
            rng: Whether to also save the states of random number generators, including Paddle's, of every trainer.
            local: Names of fields that differ between trainers.
            **fields: The fields to save and restore, by name.

        Raises:
            SettingsError: A field has a reserved name.
        """
        super().__init__(rng=rng, local=(*local, _RNG), **fields)
        if rng:
            setattr(self, _RNG, PaddleRng())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, wrapped(value))

    def __getattr__(self, name: str) -> Any:
        return unwrapped(super().__getattr__(name))


class Checkpointer(checkpoint.Checkpointer):
    """Save and restore the state of Paddle's trainers. Its creation is collective, on all trainers.

    Args:
        state: The state to save and restore.
        **options: Options of `edl.collective.Checkpointer`.

    Raises:
        SettingsError: The trainers have not called `init_parallel_env`.
    """

    def __init__(self, state: State, **options: Any) -> None:
        _join(_TIMEOUT_S)
        super().__init__(state, **options)


def _trainers() -> int:
    return read("PADDLE_TRAINERS_NUM", int) or 1


def _join(timeout_s: float) -> None:
    """Form the torch process group, on the CPU, through which trainers agree on checkpoints and exchange states."""
    if _trainers() == 1 or torch.distributed.is_initialized():
        return
    if not paddle.distributed.is_initialized():
        raise SettingsError("call edl.collective.paddle.init_parallel_env() before creating a Checkpointer")
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: Any = paddle.to_tensor([0 if server is None else server.port], dtype="int64")
    paddle.distributed.broadcast(port, 0)
    first = (read("PADDLE_TRAINER_ENDPOINTS", str) or "127.0.0.1:0").partition(",")[0]
    host = first.rpartition(":")[0]
    store = server or TCPStore(host, port.item(), is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        "gloo", store=PrefixStore("edl", store), rank=rank, world_size=world, timeout=timeout
    )


def _wait_for(endpoint: str, timeout_s: float) -> None:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise TemporaryError(f"the first trainer, at {endpoint}, did not start within {timeout_s:g} s") from exc
            time.sleep(_POLL_S)
