"""Saving and restoring the fields of a `State`: modules, optimizers, objects with a state, plain values.

Modules are saved without their wrappers (`DistributedDataParallel`, `torch.compile`), and an optimizer's state by the
names of parameters instead of their numbers, so that a state saved with one wrapping can be loaded with another.

A torchdata `StatefulDataLoader` has its position in its own `state_dict`, which leaves some cases open (0.11). The code
here closes them:

- Iterating over a loader draws a seed, from its generator or from torch's. A resumed epoch draws a different one than
  an uninterrupted epoch, so random numbers are restored after that.
- A loader that was never iterated over starts its worker processes when it is asked for its state.
- A worker process that reached the end of its stream before others is asked for data again after a restart. A stream
  that starts over at its end would return its samples twice.
- Some samplers and datasets cannot be resumed exactly, and torchdata reports no error. They are refused here.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data._utils import fetch

from edl.collective.checkpoint.state.tensors import local_box, walk_tensors
from edl.errors import SettingsError

__all__ = [
    "FieldKind",
    "capture_random_states",
    "check_loadable",
    "field_form",
    "field_kind",
    "in_place_tensors",
    "is_stateful_loader",
    "layers",
    "load_field",
    "loader_position",
    "optimizer_parameters",
    "parameter_names",
    "prepare_loader",
    "restore_random_states",
    "resume_loader",
    "unwrapped",
]


def layers(module: nn.Module) -> list[nn.Module]:
    """Return a module and what it wraps, from the outside in; the module that the user wrote is the last.

    Raises:
        SettingsError: The module is wrapped in FSDP's first version, which alone can name its parts.
    """
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
    """Return the module that the user wrote, without wrappers.

    Raises:
        SettingsError: The module is wrapped in FSDP's first version, which alone can name its parts.
    """
    return layers(module)[-1]


def capture_random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and that of the current CUDA device if in use."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the generators' states that `capture_random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- Positions of torchdata's `StatefulDataLoader` ---


def is_stateful_loader(value: Any) -> bool:
    """Return whether the value is a `StatefulDataLoader` of torchdata."""
    # Another thread may be importing torchdata right now; then no such loader exists yet.
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind)


def prepare_loader(loader: Any) -> None:
    """Make worker processes of a `StatefulDataLoader` remember that their stream ended. Call it before they start."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    if loader.num_workers and is_stream and not isinstance(loader.worker_init_fn, _WorkerInit):
        loader.worker_init_fn = _WorkerInit(loader.worker_init_fn)


def loader_position(loader: Any) -> dict[str, Any]:
    """Return the position of a `StatefulDataLoader` as plain values and tensors; {} if it was not iterated over.

    Raises:
        SettingsError: The loader could not resume from there exactly.
    """
    _check_samplers(loader)
    if loader._iterator is None:
        resumption = vars(loader).get("_get_iterator")
        return resumption.place if isinstance(resumption, _Resumption) else {}
    state = loader.state_dict()
    if any(map(_only_counts, _dataset_states(state))):
        raise SettingsError(
            f"a StatefulDataLoader of {type(loader.dataset).__name__}, which has no state_dict, cannot be resumed "
            "twice: torchdata then leaves samples out. Give the dataset state_dict() and load_state_dict()"
        )
    generator = loader.generator if _draws_order(loader) else None
    return {"state": state, "generator": None if generator is None else generator.get_state()}


def resume_loader(loader: Any, place: dict[str, Any]) -> None:
    """Have the next iteration of a `StatefulDataLoader` resume at a position.

    The iterator is made only when the loop asks for it, so that a sampler's `set_epoch` is called before.
    """
    vars(loader).pop("_get_iterator", None)
    loader._iterator = None
    loader.load_state_dict(place.get("state", {}))
    if place:
        loader._get_iterator = _Resumption(loader, place)


class _Resumption:
    """Stands in for the loader's method once, to make the iterator of an interrupted epoch."""

    def __init__(self, loader: Any, place: dict[str, Any]) -> None:
        self._loader = loader
        self.place = place

    def __call__(self) -> Any:
        loader = self._loader
        del loader._get_iterator
        drawn = torch.get_rng_state()
        prepare_loader(loader)
        begin_worker = loader.worker_init_fn
        if isinstance(begin_worker, _WorkerInit):
            begin_worker.ended = _ended_workers(self.place["state"])
            iterator = loader._get_iterator()
            begin_worker.ended = frozenset()  # no worker has reached the end of the next epoch
        else:
            iterator = loader._get_iterator()
        torch.set_rng_state(drawn)
        if self.place["generator"] is not None:
            loader.generator.set_state(self.place["generator"])
        return iterator


class _StreamFetcher(fetch._IterableDatasetFetcher):
    """Reads a stream to its end and does not start over; replaces torch's fetcher in worker processes.

    Torch's own does not remember the end of a stream that makes batches itself, and torchdata resets what it remembers.

    Attributes:
        begins_ended: Whether the next fetcher made in this process is already at its end.
    """

    begins_ended = False

    def __init__(self, *args: Any) -> None:
        self._ended = _StreamFetcher.begins_ended
        _StreamFetcher.begins_ended = False
        super().__init__(*args)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read. Once True, it stays True."""
        return self._ended

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = self._ended or ended

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the next batch, or raise StopIteration and remember the end."""
        try:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        except StopIteration:
            self._ended = True
            raise


class _WorkerInit:
    """The first function that a loader's worker process runs: installs `_StreamFetcher`, then calls the script's own.

    Attributes:
        ended: Numbers of the workers whose streams have already ended in the resumed epoch.
    """

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function
        self.ended: frozenset[int] = frozenset()

    def __call__(self, worker_id: int) -> None:
        _StreamFetcher.begins_ended = worker_id in self.ended
        fetch._IterableDatasetFetcher = _StreamFetcher  # type: ignore[assignment,misc]
        if self._function is not None:
            self._function(worker_id)


def _ended_workers(state: dict[str, Any]) -> frozenset[int]:
    """Return the numbers of the workers that have read their streams to the end, according to a loader's state."""
    workers = (state.get("_snapshot") or {}).get("_worker_snapshots", {}).values()
    fetchers = ((worker["worker_id"], worker.get("fetcher_state") or {}) for worker in workers if worker)
    return frozenset(number for number, fetcher in fetchers if fetcher.get("fetcher_ended"))


def _check_samplers(loader: Any) -> None:
    if loader.num_workers and not loader.in_order:
        raise SettingsError("a StatefulDataLoader with in_order=False cannot say where it is: use in_order=True")
    for sampler in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "keeps_place", False):
            raise SettingsError(
                f"the place of a StatefulDataLoader with {type(sampler).__name__} is that of the sampler, since the "
                "loader reads ahead: give the State the sampler, not the loader"
            )
        stateless = not hasattr(sampler, "state_dict")
        if stateless and isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise SettingsError(
                f"torch's {type(sampler).__name__} shuffles anew after a restart: give the StatefulDataLoader "
                "shuffle=True, or a sampler with state_dict() and load_state_dict(), or use ElasticSampler"
            )


def _draws_order(loader: Any) -> bool:
    """Return whether the order of an epoch is drawn at its start, from the generator of the loader's seeds."""
    module = sys.modules["torchdata.stateful_dataloader.sampler"]
    sampler = loader.sampler
    return (
        loader.generator is not None
        and isinstance(sampler, module.RandomSampler)
        and sampler.generator is loader.generator
        and not sampler.replacement
    )


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the dataset's part of the loader's state, once or for every worker process."""
    if "_snapshot" not in state:
        return [state]
    return [worker for worker in state["_snapshot"]["_worker_snapshots"].values() if worker]


def _only_counts(state: dict[str, Any]) -> bool:
    """Return whether the position in a stream is only a count of batches."""
    fetcher = state.get("fetcher_state")
    return fetcher is not None and fetcher.get("dataset_iter_state") is None and state.get("dataset_state") is None


# --- Fields ---


FieldKind = Literal["module", "optimizer", "object", "value"]
Names = Mapping[int, str]
"""Names of parameters, by the id() of the parameter."""


def field_kind(value: Any) -> FieldKind:
    """Return which kind of field a value is."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "object"
    return "value"


def parameter_names(fields: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return the names of all parameters of the modules among `fields`; names that occur twice get the field's name."""
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
    """Make FSDP2 hold its shards, which the optimizer knows, after a forward pass has left whole parameters.

    The root module keeps whole parameters until a backward pass, which an evaluation does not have.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # importing it takes a while
        return
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def field_form(value: Any, names: Names) -> Any:
    """Return the field as plain values and tensors."""
    if isinstance(value, nn.Module):
        return dict(unwrapped(value).state_dict())
    if isinstance(value, torch.optim.Optimizer):
        return _by_name(value, names)
    if is_stateful_loader(value):
        return loader_position(value)
    return value.state_dict() if field_kind(value) == "object" else value


def in_place_tensors(field: str, value: Any, taken: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a field that may be overwritten in place, by their keys in the state.

    These are a module's parameters and buffers, if its `state_dict` returns their memory and not a copy; an optimizer's
    state; a field that is itself a tensor; and parameters within plain values, to which an optimizer may refer. Tensors
    of other objects are left to these objects.
    """
    if isinstance(value, nn.Module):
        module = unwrapped(value)
        own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        return {
            f"{field}.{key}": tensor
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
    return {key: tensor for key, tensor in walk_tensors(value, (field,)) if key == field or _is_trained(tensor)}


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def optimizer_parameters(field: str, value: Any, names: Names) -> dict[str, torch.Tensor]:
    """Return the parameters that an optimizer's state is sharded like, by the state's keys without their last part."""
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return {f"{field}.state.{name}": parameter for name, parameter in _parameters(value, names)}


def load_field(field: str, value: Any, form: Any, names: Names) -> Any:
    """Load a restored form into a field. Returns the new value of the field.

    Raises:
        SettingsError: The form does not fit the field. The message says why.
    """
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
    """Check, without calling it, that an object's `load_state_dict` accepts a single argument, the saved state.

    Raises:
        SettingsError: It accepts no argument, or requires more than one.
    """
    if field_kind(value) != "object":
        return
    try:
        inspect.signature(value.load_state_dict).bind({})
    except TypeError as exc:
        raise SettingsError(f"{field}: its load_state_dict() is called with the saved state alone: {exc}") from exc
    except ValueError:
        pass  # it is written in C and has no signature


def _load_object(field: str, value: Any, form: Any) -> None:
    try:
        value.load_state_dict(form)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise SettingsError(
            f"{field}: its load_state_dict() does not take what its state_dict() gave ({what})"
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
    """Return the optimizer's parameters by name, in the order of their numbers; those without a name, by number."""
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
            f"{field}: saved with {len(form['param_groups'])} parameter groups, has {len(optimizer.param_groups)}"
        )
    for saved, group in zip(form["param_groups"], optimizer.param_groups, strict=True):
        numbers = range(counted, counted + len(group["params"]))
        counted = numbers.stop
        here = {parameters[number][0] for number in numbers}
        if here != set(saved["params"]):
            odd = sorted(map(str, here ^ set(saved["params"])))[:5]
            raise SettingsError(f"{field}: its parameters differ from the saved ones, among them {', '.join(odd)}")
        groups.append({**saved, "params": list(numbers)})
    state = {number_of[name]: dict(values) for name, values in form["state"].items()}
    optimizer.load_state_dict({**form, "state": state, "param_groups": groups})
    for number, values in state.items():
        _keep_types(optimizer.state[parameters[number][1]], values)


def _keep_types(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore the saved dtypes of an optimizer's state, which torch casts to the parameter's dtype, bit for bit."""
    for key, tensor in saved.items():
        if isinstance(tensor, torch.Tensor) and loaded[key].dtype != tensor.dtype:
            loaded[key] = tensor.to(loaded[key].device)
