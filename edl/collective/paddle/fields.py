"""Paddle's objects as fields of a `State`: they give their tensors as torch's, and take them back bit for bit.

A Paddle tensor in host memory and a torch tensor can be the same memory (DLPack), in all types, bfloat16 included. So
nothing is copied on the way out; on the way back Paddle copies into the tensors that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
import torch

from edl.errors import SettingsError

__all__ = ["PaddleRng", "unwrapped", "wrapped"]


def wrapped(value: Any) -> Any:
    """Wrap an object of Paddle's so that its `state_dict` has torch's tensors.

    Args:
        value: of any kind; others than Paddle's are returned as they are.
    """
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
    """Return the object that `wrapped` wrapped.

    Args:
        value: wrapped or not.
    """
    return value.inner if isinstance(value, _Wrapped) else value


class _Wrapped:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class _Layer(_Wrapped):
    """Parameters and buffers by their names in the layer; `DataParallel` around it makes no difference."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: _as_torch(tensor, name) for name, tensor in self.inner.state_dict().items()}

    def load_state_dict(self, form: Mapping[str, torch.Tensor]) -> None:
        live = self.inner.state_dict()
        odd = sorted(live.keys() ^ form.keys())
        if odd:
            raise SettingsError(f"the saved state does not fit the layer: one of them lacks {', '.join(odd[:5])}")
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
    """Accumulators and master weights by Paddle's names for them, and the schedule.

    Paddle derives the names from the parameters' names, which it numbers in the order in which layers are made: the
    script must make them in the same order every time, as it must for `paddle.load`.
    """

    def state_dict(self) -> dict[str, Any]:
        form = dict(self.inner.state_dict())
        schedule = form.pop("LR_Scheduler", None)
        masters = form.pop("master_weights", {})
        return {
            "accumulators": {name: _as_torch(tensor, name) for name, tensor in form.items()},
            # Accumulators are named after master weights where there are any, so these must keep their names.
            "masters": {name: [tensor.name, _as_torch(tensor, tensor.name)] for name, tensor in masters.items()},
            "schedule": schedule,
        }

    def load_state_dict(self, form: Mapping[str, Any]) -> None:
        parameters = [parameter.name for parameter in self.inner._parameter_list]
        for name in (*form["accumulators"], *form["masters"]):
            if not any(name.startswith(parameter) for parameter in parameters):
                raise SettingsError(
                    f"the optimizer's saved state has {name}, and the optimizer no such parameter: make the layers in "
                    "the order in which they were made when it was saved"
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
    """The state of Paddle's random numbers on the host, and on the present device."""

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the states of all generators, by device."""
        return {device: [_taken(state) for state in paddle.get_rng_state(device)] for device in self._devices()}

    def load_state_dict(self, form: Mapping[str, list[Any]]) -> None:
        """Restore the states of generators.

        Args:
            form: as `state_dict` returned it.
        """
        for device in self._devices():
            saved = form.get(device, [])
            made = [_made(now, state) for now, state in zip(paddle.get_rng_state(device), saved, strict=False)]
            if made:
                paddle.set_rng_state(made, device)

    def _devices(self) -> list[str]:
        return list(dict.fromkeys(["cpu", paddle.device.get_device().partition(":")[0]]))


def _taken(state: Any) -> tuple[int, int, int, bytes]:
    """Return a generator's state in plain values: what Paddle pickles of it."""
    device, seed, offset, engine = state.__getstate__()
    return device, seed, offset, bytes(engine)  # the engine is a text, given as a list of its characters


def _made(like: Any, taken: tuple[int, int, int, bytes]) -> Any:
    device, seed, offset, engine = taken
    state = like.__new__(type(like))
    state.__setstate__((device, seed, offset, list(engine)))
    return state


def _as_torch(tensor: Any, name: str) -> torch.Tensor:
    """Return the same memory as torch's tensor; of another device, a copy in host memory."""
    if tensor.is_dist():
        raise SettingsError(f"{name} is distributed over several trainers: only whole tensors can be saved")
    if not tensor.place.is_cpu_place():
        tensor = tensor.cpu()
    return torch.utils.dlpack.from_dlpack(tensor.detach())


def _as_paddle(tensor: Any, name: str) -> Any:
    """Return a Paddle tensor of this name, in the memory of torch's."""
    made = paddle.utils.dlpack.from_dlpack(tensor)
    made.name = name
    return made


def _put(live: Any, saved: torch.Tensor, name: str) -> None:
    """Copy the saved bits into a tensor of Paddle's.

    Raises:
        SettingsError: it has another shape or type.
    """
    kinds = [str(tensor.dtype).rpartition(".")[2] for tensor in (saved, live)]
    shapes = [tuple(saved.shape), tuple(live.shape)]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        raise SettingsError(f"{name} was saved as {kinds[0]}{shapes[0]}, and is {kinds[1]}{shapes[1]} now")
    live.set_value(_as_paddle(saved, name))
