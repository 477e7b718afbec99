"""A training job's state: everything that must be restored so that training continues as if never interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from edl.collective.checkpoint.encoding import (
    ShardLayout,
    StateMetadata,
    TensorEntry,
    decode,
    encode,
    pack_meta,
    pack_table,
)
from edl.collective.checkpoint.state.fields import (
    check_loadable,
    field_form,
    field_kind,
    in_place_tensors,
    load_field,
    optimizer_parameters,
    parameter_names,
)
from edl.collective.checkpoint.state.loaders import (
    capture_random_states,
    is_stateful_loader,
    prepare_loader,
    restore_random_states,
)
from edl.collective.checkpoint.state.tensors import (
    LiveMeshes,
    LiveTensors,
    RestoreTarget,
    TensorCollector,
    unrestorable_error,
    view_of,
    walk_tensors,
)
from edl.collective.ranks import rank_of
from edl.errors import ProtocolError, SettingsError

logger = logging.getLogger(__name__)
_RNG: Final = "rng"


@dataclass(frozen=True)
class WorldChange:
    """Passed to adjust functions: a state was restored into a world of another size."""

    old_size: int  # number of ranks that saved the state
    new_size: int  # number of ranks now
    step: int  # last finished step


Adjust = Callable[[WorldChange], object]


@dataclass(frozen=True)
class CapturedState:
    """A state at one moment: metadata, and the live tensors, which the next step changes."""

    meta: bytes  # metadata, in the form that `edl.collective.checkpoint.encoding.parse_meta` reads
    entries: tuple[TensorEntry, ...]  # positions of the tensors in the data
    tensors: list[torch.Tensor]  # this rank's parts, on their devices
    holders: frozenset[int] = frozenset()  # ranks with the same shards, if any; with `per_rank` fields, only this rank

    @property
    def data_nbytes(self) -> int:
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)


class State:
    """Hold the fields of a training job that are saved and restored.

    A field is a module, an optimizer, any object with `state_dict` and `load_state_dict`, or a plain value: None,
    numbers, strings, bytes, lists, tuples, dicts, sets, numpy arrays and tensors, nested as you like. Fields are
    attributes, and you can set them at any time::

        state = State(model=model, optimizer=optimizer, epoch=0)
        state.epoch += 1

    Fields should be the same on all ranks, with three exceptions:

    - A `DTensor` (FSDP2's `fully_shard`) is saved as the part that the rank holds.
    - `local` fields belong to one rank alone. These fields and the states of the random number generators are restored
      if the world has the same size and the rank's host is still part of the world.
    - `per_rank` fields also belong to one rank alone, but are never lost. An example is the position in a stream of
      which every rank reads a different part. These fields are restored exactly or not at all, if necessary from a
      replica on another host, and only into a world of the same size. A `StatefulDataLoader` from torchdata is always
      such a field, unless it is named in `local`. Add the loader to the state before you iterate over it.

    Args:
        rng: Whether to also save, for every rank, the states of Python's, numpy's and torch's random number generators.
        local: Names of fields that differ between ranks.
        per_rank: Names of fields that differ between ranks, and that no rank may continue without.
        **fields: The fields to save and restore, by name.

    Raises:
        SettingsError: A field has a reserved name, or is both local and per_rank.
    """

    _meshes: LiveMeshes | None  # declared because attributes go through `__getattr__`, where type checkers see none

    def __init__(
        self, *, rng: bool = True, local: Iterable[str] = (), per_rank: Iterable[str] = (), **fields: Any
    ) -> None:
        own = vars(self)
        own["_fields"] = {}
        own["_adjust"] = []
        own["_rng"] = rng
        own["_local"] = frozenset(local)
        own["_per_rank"] = frozenset(per_rank)
        both = sorted(own["_local"] & own["_per_rank"])
        if both:
            raise SettingsError(f"field {both[0]} is local, which may be lost, and per_rank, which may not: choose one")
        own["_table"] = (None, b"")
        own["_meshes"] = None
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == _RNG or hasattr(type(self), name):
            raise SettingsError(f"a State cannot have a field named {name!r}: choose another name")
        if is_stateful_loader(value):
            prepare_loader(value)
        self._fields[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_fields"][name]
        except KeyError:
            raise AttributeError(f"this State has no field {name!r}") from None

    def __delattr__(self, name: str) -> None:
        if name not in self._fields:
            raise AttributeError(f"this State has no field {name!r}")
        del self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def register_adjust_function(self, adjust: Adjust) -> Adjust:
        """Have `adjust` called after every restore into a world of another size. Also works as a decorator.

        Args:
            adjust: Function that takes a `WorldChange`.

        Returns:
            `adjust` itself.
        """
        self._adjust.append(adjust)
        return adjust

    def adjust(self, change: WorldChange) -> None:
        """Call the registered functions in the order in which they were registered.

        Args:
            change: The `WorldChange` to pass to the functions.
        """
        for adjust in self._adjust:
            adjust(change)

    @contextmanager
    def keep_random_numbers(self) -> Iterator[None]:
        """Return a context manager that, at its end, restores the random number generators that this state saves."""
        drawn = capture_random_states() if self._rng else None
        try:
            yield
        finally:
            if drawn is not None:
                restore_random_states(drawn)

    def per_rank(self) -> frozenset[str]:
        """Return the names of the fields that belong to one rank alone and must not be lost."""
        fields: dict[str, Any] = self._fields
        given: frozenset[str] = self._per_rank
        loaders = frozenset(
            name for name, value in fields.items() if is_stateful_loader(value) and name not in self._local
        )
        return given.intersection(fields) | loaders

    def capture(self) -> CapturedState:
        """Return the current state. Copies only small values; the tensors are the live ones.

        Raises:
            SettingsError: A field holds something that cannot be saved.
        """
        gathered = TensorCollector()
        names = parameter_names(self._fields.items())
        kinds: dict[str, str] = {}
        tree: dict[str, bytes] = {}
        local: dict[str, bytes] = {}
        per_rank = self.per_rank()
        for name, value in self._fields.items():
            own = name in self._local or name in per_rank
            gathered.scope = "local" if own else "replicated"
            kinds[name] = kind = field_kind(value)
            gathered.made_anew = kind in ("object", "value")
            form = encode(field_form(value, names), gathered, (name,))
            (local if own else tree)[name] = form
        if self._rng:
            gathered.scope = "local"
            local[_RNG] = encode(capture_random_states(), gathered, (_RNG,))
        entries = tuple(gathered.entries)
        holders = frozenset([rank_of(None)]) if per_rank else gathered.holders
        laid_out = (entries, gathered.layouts, holders)
        if laid_out != self._table[0]:
            self._check_restorable(entries, gathered.layouts)
            vars(self)["_table"] = laid_out, pack_table(entries, gathered.layouts, sorted(holders))
        return CapturedState(
            pack_meta(kinds, tree, local, self._table[1], per_rank), entries, gathered.tensors, holders
        )

    def begin_restore(self) -> None:
        """Remember this state's meshes: a restarted script has no others, so a later save with others is refused."""
        vars(self)["_meshes"] = self._live_tensors(self._fields).meshes

    def _check_restorable(self, entries: Iterable[TensorEntry], layouts: Sequence[ShardLayout]) -> None:
        meshes: LiveMeshes | None = self._meshes
        unknown = sorted((self._local | self._per_rank) - set(self._fields))
        if unknown:
            raise SettingsError(f"local= or per_rank= names {', '.join(unknown)}, but the State has no such field")
        for name, value in self._fields.items():
            check_loadable(name, value)
        for entry in entries:
            if entry.layout >= 0 and meshes is not None and meshes.find_mesh(layouts[entry.layout]) is None:
                raise unrestorable_error(entry, layouts[entry.layout])

    def _live_tensors(self, wanted: Collection[str]) -> LiveTensors:
        in_place: dict[str, torch.Tensor] = {}
        alike: dict[str, torch.Tensor] = {}
        parameters: dict[str, torch.Tensor] = {}
        names = parameter_names(self._fields.items())
        for name, value in self._fields.items():
            if name in wanted:
                taken = field_form(value, names)
                in_place.update(in_place_tensors(name, value, taken))
                alike.update(walk_tensors(taken, (name,)))
                parameters.update(optimizer_parameters(name, value, names))
        return LiveTensors(in_place, alike, parameters, LiveMeshes([*alike.values(), *parameters.values()]))

    def begin_load(self, meta: StateMetadata, *, local: bool = True) -> StateRestore:
        """Begin to restore a saved state.

        Args:
            meta: Metadata of the saved state from any rank, or from this rank if `local` is True.
            local: Whether to also restore what belongs to this rank alone.

        Returns:
            The restore: fill its tensors, then call its `finish`.

        Raises:
            SettingsError: `local` is False, but the state has `per_rank` fields.
        """
        return StateRestore(self, meta, local)


class StateRestore:
    """A restore in progress. From the first `fill_tensor` to `finish`, old and new parts are mixed."""

    def __init__(self, state: State, meta: StateMetadata, local: bool) -> None:
        lacking = sorted(meta.per_rank & set(state)) if not local else ()
        if lacking:
            raise SettingsError(
                f"field {lacking[0]} of the State is each rank's own position in its data, and was saved with a "
                "different number of ranks: continuing would repeat some samples and skip others. Start as many "
                "workers as before, or use ElasticSampler, whose position is valid for any number of workers"
            )
        self._state = state
        self._meta = meta
        self._forms = {**meta.tree, **(meta.local if local else {})}
        self._names = parameter_names(state._fields.items())
        live = state._live_tensors(self._forms)
        self._targets: dict[str, RestoreTarget] = {}
        for entry in meta.entries:
            if entry.key.partition(".")[0] in self._forms:
                layout = meta.layouts[entry.layout] if entry.layout >= 0 else None
                self._targets[entry.key] = live.restore_target(entry, layout)

    @property
    def targets(self) -> dict[str, RestoreTarget]:
        return self._targets

    def fill_tensor(self, entry: TensorEntry, part: torch.Tensor) -> None:
        target = self._targets.get(entry.key)
        if target is not None:
            if tuple(entry.whole) != tuple(target.value.shape):
                raise ProtocolError(
                    f"{entry.key}: saved with shape {entry.whole}, but now has {tuple(target.value.shape)}"
                )
            target.fill_part(entry.starts, part)

    def fill_tensors(self, entries: Iterable[TensorEntry], data: torch.Tensor) -> None:
        for entry in entries:
            if entry.key in self._targets:
                self.fill_tensor(entry, view_of(data, entry))

    def finish(self) -> None:
        lacking = [target.key for target in self._targets.values() if target.missing]
        if lacking:
            raise ProtocolError(f"{len(lacking)} tensors are incomplete in the saved state, among them {lacking[0]}")
        for name, form in self._forms.items():
            if name != _RNG:
                self._load_field(name, decode(form, self._restored_tensor))
        if _RNG in self._forms and self._state._rng:
            restore_random_states(decode(self._forms[_RNG], self._restored_tensor))
        for name in set(self._state) - self._meta.kinds.keys():
            logger.warning("the saved state has no field %s: the field keeps its value", name)

    def _load_field(self, name: str, form: Any) -> None:
        if name in self._state._fields:
            current = self._state._fields[name]
            saved, kind = self._meta.kinds.get(name), field_kind(current)
            if saved != kind:
                raise SettingsError(f"field {name} was saved as {saved}, but is now {kind}")
            self._state._fields[name] = load_field(name, current, form, self._names)
        elif self._meta.kinds.get(name) == "value":
            self._state._fields[name] = form
        else:
            logger.warning("the saved state has a field %s that this State lacks: it is ignored", name)

    def _restored_tensor(self, number: int) -> Any:
        target = self._targets[self._meta.entries[number].key]
        return target.value
