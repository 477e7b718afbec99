"""Saves and restores the fields of a `State`: modules, optimizers, objects with a state, plain values.

Modules are saved without their wrappers (`DistributedDataParallel`, `torch.compile`). An optimizer's state is keyed by
parameter names instead of parameter numbers. So a state saved with one wrapping can be loaded with another.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from edl.collective.checkpoint.state.loaders import has_state, is_stateful_loader, loader_position, resume_loader
from edl.collective.checkpoint.state.tensors import is_trained, local_box, walk_tensors
from edl.errors import SettingsError


def layers(module: nn.Module) -> list[nn.Module]:
    """Return a module and the modules that it wraps, from the outside in. The last is the user's own module."""
    found = [module]
    while True:
        outer = found[-1]
        if isinstance(outer, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = outer.module
        else:
            inner = getattr(outer, "_orig_mod", None)  # the module that `torch.compile` wraps
        if not isinstance(inner, nn.Module):
            break
        found.append(inner)
    if type(found[-1]).__name__ == "FullyShardedDataParallel":
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    return layers(module)[-1]


FieldKind = Literal["module", "optimizer", "object", "value"]
Names = Mapping[int, str]  # of parameters, by the id() of the parameter


def field_kind(value: Any) -> FieldKind:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "object" if has_state(value) else "value"


def parameter_names(fields: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return the names of all parameters of modules in `fields`. A repeated name gets the field's name as a prefix."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for field, value in fields:
        if not isinstance(value, nn.Module):
            continue
        module = unwrapped(value)
        _shard_again(module)
        for name, parameter in module.named_parameters():
            names[id(parameter)] = f"{field}.{name}" if name in taken else name
            taken.add(names[id(parameter)])
    return names


def _shard_again(module: nn.Module) -> None:
    """Make FSDP2 hold the shards that the optimizer knows, after a forward pass that no backward pass followed."""
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes a while
        return
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def field_form(value: Any, names: Names) -> Any:
    if isinstance(value, nn.Module):
        return dict(unwrapped(value).state_dict())
    if isinstance(value, torch.optim.Optimizer):
        return _by_name(value, names)
    if is_stateful_loader(value):
        return loader_position(value)
    return value.state_dict() if field_kind(value) == "object" else value


def in_place_tensors(field: str, value: Any, taken: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a field that may be overwritten in place, by their keys in the state.

    These are: a module's parameters and buffers, if its `state_dict` returns tensors that share their memory; an
    optimizer's state; a field that is itself a tensor; and parameters within plain values, because an optimizer may
    refer to them.
    """
    if isinstance(value, nn.Module):
        module = unwrapped(value)
        own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        return {
            f"{field}.{key}": own[key]
            for key, tensor in taken.items()
            if key in own and isinstance(tensor, torch.Tensor) and _same_memory(tensor, own[key])
        }
    if isinstance(value, torch.optim.Optimizer):
        return {
            f"{field}.state.{name}.{key}": tensor
            for name, values in taken["state"].items()
            for key, tensor in values.items()
            if isinstance(tensor, torch.Tensor)
        }
    if field_kind(value) == "object":
        return {}
    return {key: tensor for key, tensor in walk_tensors(value, (field,)) if key == field or is_trained(tensor)}


def optimizer_parameters(field: str, value: Any, names: Names) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters, whose sharding its state shares, by keys such as `optimizer.state.NAME`."""
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return {f"{field}.state.{name}": parameter for name, parameter in _parameters(value, names)}


def load_field(field: str, value: Any, form: Any, names: Names) -> Any:
    """Load a restored form into a field. Returns the new value of the field."""
    if isinstance(value, nn.Module):
        _load_module(field, unwrapped(value), form)
    elif isinstance(value, torch.optim.Optimizer):
        _load_optimizer(field, value, form, names)
    elif is_stateful_loader(value):
        resume_loader(value, form)
    elif field_kind(value) == "object":
        _load_object(field, value, form)
    else:
        return form
    return value


def _load_module(field: str, module: nn.Module, form: Any) -> None:
    current = module.state_dict()
    inplace = in_place_tensors(field, module, current)
    if current.keys() == form.keys() and all(
        isinstance(saved, torch.Tensor) and f"{field}.{key}" in inplace and _same_memory(saved, current[key])
        for key, saved in form.items()
    ):
        return  # all tensors were already filled in place
    try:
        module.load_state_dict(form)
    except RuntimeError as exc:
        raise SettingsError(f"{field}: the saved state does not fit the model: {exc}") from exc


def check_loadable(field: str, value: Any) -> None:
    """Check, without calling it, that an object's `load_state_dict` accepts a single argument, the saved state."""
    if field_kind(value) != "object":
        return
    try:
        inspect.signature(value.load_state_dict).bind({})
    except TypeError as exc:
        raise SettingsError(f"{field}: its load_state_dict() must take one argument, the saved state: {exc}") from exc
    except ValueError:
        pass  # it is written in C and has no signature


def _load_object(field: str, value: Any, form: Any) -> None:
    try:
        value.load_state_dict(form)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise SettingsError(
            f"{field}: its load_state_dict() does not accept what its state_dict() returned ({what})"
        ) from exc


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor is other:
        return True
    mine, theirs = local_box(tensor)[0], local_box(other)[0]
    return (
        mine.shape == theirs.shape
        and mine.stride() == theirs.stride()
        and mine.dtype == theirs.dtype
        and mine.device == theirs.device
        and (mine.numel() == 0 or mine.data_ptr() == theirs.data_ptr())
    )


def _parameters(optimizer: torch.optim.Optimizer, names: Names) -> list[tuple[Any, torch.Tensor]]:
    """Return the optimizer's parameters in numerical order, each with its name or, if it has none, its number."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(names.get(id(parameter), number), parameter) for number, parameter in enumerate(parameters)]


def _by_name(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    form = dict(optimizer.state_dict())
    name_of = [name for name, _ in _parameters(optimizer, names)]
    form["state"] = {name_of[number]: values for number, values in form["state"].items()}
    form["param_groups"] = [
        {**group, "params": [name_of[number] for number in group["params"]]} for group in form["param_groups"]
    ]
    return form


def _load_optimizer(field: str, optimizer: torch.optim.Optimizer, form: Any, names: Names) -> None:
    parameters = _parameters(optimizer, names)
    number_of = {name: number for number, (name, _) in enumerate(parameters)}
    groups, counted = [], 0
    if len(form["param_groups"]) != len(optimizer.param_groups):
        raise SettingsError(
            f"{field}: saved with {len(form['param_groups'])} parameter groups, now has {len(optimizer.param_groups)}"
        )
    for saved, group in zip(form["param_groups"], optimizer.param_groups, strict=True):
        numbers = range(counted, counted + len(group["params"]))
        counted = numbers.stop
        here = {parameters[number][0] for number in numbers}
        if here != set(saved["params"]):
            odd = sorted(map(str, here ^ set(saved["params"])))[:5]
            raise SettingsError(f"{field}: its parameters differ from the saved ones, for example {', '.join(odd)}")
        groups.append({**saved, "params": list(numbers)})
    state = {number_of[name]: dict(values) for name, values in form["state"].items()}
    try:
        optimizer.load_state_dict({**form, "state": state, "param_groups": groups})
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise SettingsError(f"{field}: {type(optimizer).__name__} does not accept the saved state ({what})") from exc
    for number, values in state.items():
        _keep_types(optimizer.state[parameters[number][1]], values)


def _keep_types(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore an optimizer's state bit for bit in its saved dtypes; torch casts it to the parameter's dtype."""
    for key, tensor in saved.items():
        if isinstance(tensor, torch.Tensor) and loaded[key].dtype != tensor.dtype:
            loaded[key] = tensor.to(loaded[key].device)
