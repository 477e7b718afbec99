"""The end of the last finished step, as a state that a step which failed half-way can be taken back to.

A step that fails in a collective has run its forward pass: running statistics, random numbers, the sampler's position
have moved on. They are small, and copied here after every step. Parameters and what an optimizer keeps of them are
large, and change only in `Optimizer.step`; if that was called since, there is no way back, and `undo` says so. Without
an optimizer in the state, nobody can tell when parameters change, and they are copied as well.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from edl.collective.checkpoint.state.fields import field_kind
from edl.collective.checkpoint.state.random_states import capture_random_states, restore_random_states
from edl.collective.checkpoint.state.state import State
from edl.collective.unwrapping import unwrapped

__all__ = ["Boundary"]


@dataclass
class _Noted:
    """Copies: of tensors by field and name, of what the other fields hold, of random number generators."""

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]
    rng: dict[str, Any]


class Boundary:
    """Remembers the end of the last step of `state`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._noted: _Noted | None = None
        self._updated = False
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []

    def note(self) -> None:
        """A step is finished: this is where `undo` goes back to."""
        self._hook()
        live = dict(self._tensors())
        old = self._noted.tensors if self._noted is not None else {}
        if all(name in old and old[name].shape == tensor.shape for name, tensor in live.items()):
            copies = {name: old[name] for name in live}
            if copies:
                torch._foreach_copy_(list(copies.values()), list(live.values()))
        else:
            copies = {name: tensor.clone() for name, tensor in live.items()}
        fields = {name: copy.deepcopy(_held(field)) for name, field in self._others()}
        self._noted = _Noted(copies, fields, capture_random_states())
        self._updated = False

    def undo(self) -> bool:
        """Take the state back to the end of the last step, and forget gradients.

        Returns:
            False if that is not possible: no step was noted, or an optimizer has changed parameters since.
        """
        for _, field in self._fields():
            if isinstance(field, nn.Module):
                field.zero_grad(set_to_none=True)
        if self._noted is None or self._updated:
            return False
        for name, tensor in self._tensors():
            tensor.copy_(self._noted.tensors[name])
        for name, field in self._others():
            if name in self._noted.fields:
                self._put_back(name, field, copy.deepcopy(self._noted.fields[name]))
        restore_random_states(self._noted.rng)
        return True

    def forget(self) -> None:
        """There is no step to go back to, until the next is noted."""
        self._noted = None

    def close(self) -> None:
        """Watch the optimizers no longer."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self) -> None:
        for _, field in self._fields():
            if isinstance(field, Optimizer) and field not in self._hooked:
                self._hooked.add(field)
                self._hooks.append(field.register_step_pre_hook(self._update))

    def _update(self, *_: object) -> None:
        self._updated = True

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self._state, name)) for name in self._state]

    def _others(self) -> list[tuple[str, Any]]:
        """All fields but modules and tensors."""
        return [(name, field) for name, field in self._fields() if not isinstance(field, (nn.Module, torch.Tensor))]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a step may change of modules, and of fields that are tensors, before an optimizer does."""
        fields = self._fields()
        by_optimizer = any(isinstance(field, Optimizer) for _, field in fields)
        for name, field in fields:
            if isinstance(field, torch.Tensor):
                yield name, field.detach()
            elif isinstance(field, nn.Module):
                for key, buffer in unwrapped(field).named_buffers():
                    yield f"{name}.{key}", buffer.detach()
                for key, parameter in () if by_optimizer else unwrapped(field).named_parameters():
                    yield f"{name}.{key}", parameter.detach()

    def _put_back(self, name: str, field: Any, held: Any) -> None:
        if isinstance(field, Optimizer):
            for group, noted in zip(field.param_groups, held, strict=True):
                group.update(noted)
        elif field_kind(field) == "object":
            field.load_state_dict(held)
        else:
            setattr(self._state, name, held)


def _held(field: Any) -> Any:
    """What a field that is no module holds; of an optimizer its settings only, such as learning rates."""
    if isinstance(field, Optimizer):
        return [{key: one for key, one in group.items() if key != "params"} for group in field.param_groups]
    return field.state_dict() if field_kind(field) == "object" else field
