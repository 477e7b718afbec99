"""How the fields of a `State` are saved and restored: modules, optimizers, objects with a state, plain values.

Modules are named without what wraps them (`DistributedDataParallel`, `torch.compile`), and an optimizer's state goes
by the names of parameters instead of their numbers, so that what one wrapping saved another can load.

Of a torchdata `StatefulDataLoader`, its own `state_dict` holds the place, and the rest is what it leaves out (0.11):

- A loader that is iterated over draws a seed, from its generator or from torch's. A resumed epoch draws another than an
  epoch that was not broken off, so random numbers are put back behind it.
- A loader that was not iterated over starts its worker processes when it is asked for its state.
- A worker process that came to the end of its stream before others is asked again after a restart. A stream that begins
  again at its end would give its samples twice.
- Some samplers and datasets cannot be resumed exactly, and no error says so. They are refused here.
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
    """Return a module with all that it wraps.

    Returns:
        The module as it was given, then what every wrapper wraps; the module that the user wrote is the last.

    Raises:
        SettingsError: it is wrapped in FSDP's first version, whose parts only that can name.
    """
    found = [module]
    while True:
        outer = found[-1]
        if isinstance(outer, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = outer.module
        else:
            inner = getattr(outer, "_orig_mod", None)  # what `torch.compile` was given
        if not isinstance(inner, nn.Module):
            break
        found.append(inner)
    if type(found[-1]).__name__ == "FullyShardedDataParallel":
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote.

    Raises:
        SettingsError: it is wrapped in FSDP's first version, whose parts only that can name.
    """
    return layers(module)[-1]


def capture_random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of CUDA's current device if CUDA is in use."""
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
    """Put the generators back as `capture_random_states` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- The place of a torchdata `StatefulDataLoader` ---


def is_stateful_loader(value: Any) -> bool:
    """Return whether this is a `StatefulDataLoader` of torchdata."""
    # Another thread may be just importing it: then there is no such loader yet.
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind)


def prepare_loader(loader: Any) -> None:
    """Have the worker processes of a `StatefulDataLoader` say when their streams have ended, before they are made."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    if loader.num_workers and is_stream and not isinstance(loader.worker_init_fn, _WorkerInit):
        loader.worker_init_fn = _WorkerInit(loader.worker_init_fn)


def loader_position(loader: Any) -> dict[str, Any]:
    """Return where a `StatefulDataLoader` is, as plain values and tensors; {} if it was not iterated over.

    Raises:
        SettingsError: the loader could not go on from there exactly.
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
    """Have the next iteration of a `StatefulDataLoader` go on from a place.

    The iterator is made when the loop asks for it, after `set_epoch` of a sampler.
    """
    vars(loader).pop("_get_iterator", None)
    loader._iterator = None
    loader.load_state_dict(place.get("state", {}))
    if place:
        loader._get_iterator = _Resumption(loader, place)


class _Resumption:
    """Makes the iterator of an epoch that was broken off, in place of the loader's method, once."""

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
            begin_worker.ended = frozenset()  # of the next epoch none has
        else:
            iterator = loader._get_iterator()
        torch.set_rng_state(drawn)
        if self.place["generator"] is not None:
            loader.generator.set_state(self.place["generator"])
        return iterator


class _StreamFetcher(fetch._IterableDatasetFetcher):
    """Reads a stream until its end, and not again from its beginning; in worker processes it takes torch's place.

    torch's own does not remember the end of a stream that makes batches itself, and torchdata resets what it remembers.

    Attributes:
        begins_ended: whether the next fetcher made in this process is at its end already.
    """

    begins_ended = False

    def __init__(self, *args: Any) -> None:
        self._ended = _StreamFetcher.begins_ended
        _StreamFetcher.begins_ended = False
        super().__init__(*args)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read; once it is, it stays so."""
        return self._ended

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = self._ended or ended

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the next batch."""
        try:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        except StopIteration:
            self._ended = True
            raise


class _WorkerInit:
    """What a worker process of a loader does first: what the script wants, and to remember the end of its stream.

    Attributes:
        ended: numbers of the workers whose streams have ended in the epoch that is gone on with.
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
    """Return the numbers of the workers that have read their streams to the end, by a loader's state."""
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
    """Return whether an epoch's order is drawn at its beginning, from the generator of the loader's seeds."""
    module = sys.modules["torchdata.stateful_dataloader.sampler"]
    sampler = loader.sampler
    return (
        loader.generator is not None
        and isinstance(sampler, module.RandomSampler)
        and sampler.generator is loader.generator
        and not sampler.replacement
    )


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is in the loader's state of the dataset, once, or for every worker process."""
    if "_snapshot" not in state:
        return [state]
    return [worker for worker in state["_snapshot"]["_worker_snapshots"].values() if worker]


def _only_counts(state: dict[str, Any]) -> bool:
    """Return whether the place in a stream is a count of batches."""
    fetcher = state.get("fetcher_state")
    return fetcher is not None and fetcher.get("dataset_iter_state") is None and state.get("dataset_state") is None


# --- How the fields of a `State` are saved and restored ---


FieldKind = Literal["module", "optimizer", "object", "value"]
Names = Mapping[int, str]
"""id() of a parameter -> its name."""


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
    """Return the names of all parameters of the modules among `fields`; with the field's own where two are alike."""
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
    """Have FSDP2 hold its shards again, which an optimizer knows, where a forward pass has left whole parameters.

    A root keeps these until a backward pass, which an evaluation has none of.
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
    """Return which tensors of a field may be overwritten where they are, by their keys in the state.

    A module's parameters and buffers, if what its `state_dict` gives is their memory and not a copy; an optimizer's
    state; a tensor that is the field itself, and parameters in a field of plain values, which an optimizer may know. An
    object's own tensors are its business.
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
    """Put a restored form into a field.

    Returns:
        What the field is from now on.

    Raises:
        SettingsError: the form does not fit. The message says what does not.
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
        return  # all tensors were filled where they are
    try:
        module.load_state_dict(form)
    except RuntimeError as exc:
        raise SettingsError(f"{field}: the saved state does not fit the model: {exc}") from exc


def check_loadable(field: str, value: Any) -> None:
    """See that what an object's `state_dict` gives can be handed to its `load_state_dict`; nothing is called.

    Raises:
        SettingsError: that takes no argument, or wants more than one.
    """
    if field_kind(value) != "object":
        return
    try:
        inspect.signature(value.load_state_dict).bind({})
    except TypeError as exc:
        raise SettingsError(f"{field}: its load_state_dict() is called with the saved state alone: {exc}") from exc
    except ValueError:
        pass  # written in C, without a signature


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
    """Return the optimizer's parameters by name, in the order of their numbers; without a name, by number."""
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
    """Restore the types of an optimizer's state, which torch casts to the parameter's: saved bits come back."""
    for key, tensor in saved.items():
        if isinstance(tensor, torch.Tensor) and loaded[key].dtype != tensor.dtype:
            loaded[key] = tensor.to(loaded[key].device)
