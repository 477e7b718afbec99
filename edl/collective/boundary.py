"""The end of the last finished step, as a state that a step which failed half-way can be taken back to.

A step that fails in a collective has run its forward pass: running statistics, random numbers, the sampler's position
have moved on. They are small, and copied here after every step. Parameters and what an optimizer keeps of them are
large, and change only in `Optimizer.step`; if that was called since, there is no way back, and `undo` says so. Without
an optimizer in the state, nobody can tell when parameters change, and they are copied as well.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from edl.collective.snapshot import Entry, parse_meta
from edl.collective.state import State
from edl.collective.state_fields import kind_of, unwrapped

__all__ = ["Boundary"]


class Boundary:
    """Remembers the end of the last step of `state`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._updated = False
        self._noted: tuple[bytes, tuple[Entry, ...], list[torch.Tensor]] | None = None
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []

    def note(self) -> None:
        """A step is finished: this is where `undo` goes back to."""
        self._hook()
        captured = self._small().capture()
        self._noted = captured.meta, captured.entries, [tensor.clone() for tensor in captured.tensors]
        self._updated = False

    def undo(self) -> bool:
        """Take the state back to the end of the last step, and forget gradients.

        Returns:
            False if that is not possible: no step was noted, or an optimizer has changed parameters since.
        """
        for module in self._modules():
            module.zero_grad(set_to_none=True)
        if self._noted is None or self._updated:
            return False
        meta, entries, tensors = self._noted
        small = self._small()
        loading = small.begin_load(parse_meta(meta))
        for entry, tensor in zip(entries, tensors, strict=True):
            loading.fill(entry, tensor)
        loading.finish()
        for name in small:
            if name in self._state and kind_of(getattr(self._state, name)) == "value":
                setattr(self._state, name, getattr(small, name))
        return True

    def forget(self) -> None:
        """There is no step to go back to, until the next is noted."""
        self._noted = None

    def close(self) -> None:
        """Watch the optimizers no longer."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self) -> None:
        for name in self._state:
            value = getattr(self._state, name)
            if isinstance(value, torch.optim.Optimizer) and value not in self._hooked:
                self._hooked.add(value)
                self._hooks.append(value.register_step_pre_hook(self._update))

    def _update(self, *_: object) -> None:
        self._updated = True

    def _modules(self) -> list[nn.Module]:
        fields = [getattr(self._state, name) for name in self._state]
        return [unwrapped(field) for field in fields if isinstance(field, nn.Module)]

    def _small(self) -> State:
        """What a step may change before an optimizer does."""
        fields = {name: getattr(self._state, name) for name in self._state}
        by_optimizer = any(isinstance(field, torch.optim.Optimizer) for field in fields.values())
        small = State()
        for name, field in fields.items():
            if isinstance(field, torch.optim.Optimizer):
                setattr(small, name, _Groups(field))
            elif isinstance(field, nn.Module) and by_optimizer:
                setattr(small, name, _Buffers(unwrapped(field)))
            else:
                setattr(small, name, field)
        return small


class _Buffers:
    """A module without its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._module.named_buffers())

    @torch.no_grad()
    def load_state_dict(self, form: dict[str, torch.Tensor]) -> None:
        for name, buffer in self._module.named_buffers():
            buffer.copy_(form[name])


class _Groups:
    """An optimizer without its parameters: learning rates and the like."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {"groups": [{key: one for key, one in group.items() if key != "params"} for group in groups]}

    def load_state_dict(self, form: dict[str, Any]) -> None:
        for group, noted in zip(self._optimizer.param_groups, form["groups"], strict=True):
            group.update(noted)
