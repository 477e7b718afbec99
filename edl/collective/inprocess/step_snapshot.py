"""A copy of what a step changes before an optimizer's update, to undo a step that fails half-way.

A step that fails in a collective has run its forward pass: running statistics, random numbers and the sampler's
position have moved on. They are small, and copied here after every step. Parameters and what an optimizer keeps of them
are large, and change in `Optimizer.step` only; after a call of that there is no way back: `rollback` returns False.
Without an optimizer in the state, no hook tells when parameters change, and they are copied as well.
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

__all__ = ["StepSnapshot"]


@dataclass
class _Copies:
    """Copies: of tensors by field and name, of what the other fields hold, of random number generators."""

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]
    rng: dict[str, Any]


class StepSnapshot:
    """The end of the last step of a state.

    Args:
        state: that training changes; watched until `close`.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._copies: _Copies | None = None
        self._updated = False
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []

    def take(self) -> None:
        """Copy the state at the end of a step, for `rollback`."""
        self._hook_optimizers()
        live = dict(self._tensors())
        old = self._copies.tensors if self._copies is not None else {}
        if all(name in old and old[name].shape == tensor.shape for name, tensor in live.items()):
            copies = {name: old[name] for name in live}
            if copies:
                torch._foreach_copy_(list(copies.values()), list(live.values()))
        else:
            copies = {name: tensor.clone() for name, tensor in live.items()}
        fields = {name: copy.deepcopy(_content(field)) for name, field in self._other_fields()}
        self._copies = _Copies(copies, fields, capture_random_states())
        self._updated = False

    def rollback(self) -> bool:
        """Take the state back to the end of the last step, and drop gradients.

        Returns:
            False if that is not possible: there is no snapshot, or an optimizer has changed parameters since.
        """
        for _, field in self._fields():
            if isinstance(field, nn.Module):
                field.zero_grad(set_to_none=True)
        if self._copies is None or self._updated:
            return False
        for name, tensor in self._tensors():
            tensor.copy_(self._copies.tensors[name])
        for name, field in self._other_fields():
            if name in self._copies.fields:
                self._restore_field(name, field, copy.deepcopy(self._copies.fields[name]))
        restore_random_states(self._copies.rng)
        return True

    def discard(self) -> None:
        """Drop the snapshot: there is no way back until the next `take`."""
        self._copies = None

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def _hook_optimizers(self) -> None:
        for _, field in self._fields():
            if isinstance(field, Optimizer) and field not in self._hooked:
                self._hooked.add(field)
                self._hooks.append(field.register_step_pre_hook(self._record_update))

    def _record_update(self, *_: object) -> None:
        self._updated = True

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self._state, name)) for name in self._state]

    def _other_fields(self) -> list[tuple[str, Any]]:
        """Return all fields but modules and tensors."""
        return [(name, field) for name, field in self._fields() if not isinstance(field, (nn.Module, torch.Tensor))]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of modules and fields that a step may change before an optimizer does, with their names."""
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

    def _restore_field(self, name: str, field: Any, content: Any) -> None:
        if isinstance(field, Optimizer):
            for group, options in zip(field.param_groups, content, strict=True):
                group.update(options)
        elif field_kind(field) == "object":
            field.load_state_dict(content)
        else:
            setattr(self._state, name, content)


def _content(field: Any) -> Any:
    """Return what a field that is no module holds; of an optimizer its options only, such as learning rates."""
    if isinstance(field, Optimizer):
        return [{key: value for key, value in group.items() if key != "params"} for group in field.param_groups]
    return field.state_dict() if field_kind(field) == "object" else field
