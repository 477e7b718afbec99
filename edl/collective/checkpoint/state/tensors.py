"""Moves tensors between a live state and a snapshot: a save collects them, and a restore puts them back.

A sharded tensor (`DTensor`) is saved as this rank's part, with its position in the whole, its layout over the ranks,
and the ranks that hold the same part. In a restore, every part fills the region that it shares with the target tensor.

Modules and optimizers already have their sharded tensors when a state is restored, so these tensors are filled in
place. Other sharded tensors, such as averaged weights that a script clones in its first step, don't exist yet in a
restarted process. Such tensors are created again as they were saved, over a mesh that the live state uses.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from edl.collective.checkpoint.encoding import (
    ALIGN,
    MAX_DEPTH,
    Path,
    Scope,
    ShardLayout,
    TensorEntry,
    box_overlap,
    dotted,
)
from edl.collective.ranks import byte_tensor
from edl.errors import ProtocolError, SettingsError

Shape = tuple[int, ...]


def is_sharded(tensor: object) -> bool:
    # Another thread, such as the one that stores, may be importing DTensor right now; then none exists yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_trained(tensor: torch.Tensor) -> bool:
    """Return whether an optimizer may refer to the tensor."""
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as after `expand`. Torch does not copy into such a tensor."""
    return 0 in tensor.stride() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Shape]:
    """Return the part of a tensor that this rank holds, and the indices in the whole tensor where the part begins."""
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    if any(placement.is_partial() for placement in whole.placements):
        raise SettingsError("a DTensor with partial sums cannot be saved: redistribute it first")
    shape, starts = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    local = whole.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise SettingsError(f"a DTensor's part has the shape {tuple(local.shape)}, but {tuple(shape)} is expected")
    return local, tuple(int(start) for start in starts)


def shard_layout(tensor: Any) -> ShardLayout:
    """Return a `DTensor`'s layout over the ranks, as plain values from which a similar tensor can be made."""
    mesh = tensor.device_mesh
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return ShardLayout(names, tuple(mesh.mesh.shape), ranks, tuple(map(_encode_placement, tensor.placements)))


def _encode_placement(placement: Any) -> tuple[int, ...]:
    """Return () for a replica, or the sharded dimension and, with FSDP over tensor parallelism, the split factor."""
    if placement.is_replicate():
        return ()
    if placement.is_shard():
        return (int(placement.dim),)
    if hasattr(placement, "split_factor"):
        return (int(placement.dim), int(placement.split_factor))
    raise SettingsError(f"a DTensor with the placement {placement!r} cannot be saved: redistribute it to Shard first")


def shard_holders(tensor: Any) -> frozenset[int]:
    """Return the global ranks that hold the same part of a `DTensor` as this rank; with HSDP there are several."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return frozenset({dist.get_rank()})
    index = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(tensor.placements, place, strict=True)
    )
    return frozenset(int(rank) for rank in mesh.mesh[index].flatten().tolist())


def walk_tensors(form: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers with the keys that `TensorCollector` gives them."""
    if isinstance(form, torch.Tensor):
        yield dotted(path), form
    elif len(path) > MAX_DEPTH:
        return
    elif isinstance(form, dict):
        for key, value in form.items():
            yield from walk_tensors(value, (*path, key))
    elif isinstance(form, list | tuple | collections.deque):
        for index, value in enumerate(form):
            yield from walk_tensors(value, (*path, index))


class LiveMeshes:
    """The meshes that the live state's tensors are sharded over."""

    def __init__(self, tensors: Iterable[object]) -> None:
        self._meshes: dict[Any, ShardLayout] = {}
        for tensor in tensors:
            if is_sharded(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                if mesh not in self._meshes:
                    self._meshes[mesh] = shard_layout(tensor)

    def find_mesh(self, layout: ShardLayout) -> Any:
        """Return a mesh with as many dimensions and the same names, preferably with the same ranks, or else shape."""
        alike = [
            (own.ranks == layout.ranks, own.mesh_shape == layout.mesh_shape, mesh)
            for mesh, own in self._meshes.items()
            if own.names == layout.names and len(own.mesh_shape) == len(layout.mesh_shape)
        ]
        return max(alike, key=lambda found: found[:2])[2] if alike else None

    def empty_tensor(
        self, layout: ShardLayout, whole: Shape, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """Return a new tensor with a saved layout and the shape `whole`; None if no live mesh matches."""
        mesh = self.find_mesh(layout)
        if mesh is None:
            return None
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
        from torch.distributed.tensor.placement_types import _StridedShard

        placements: list[Any] = [
            Replicate()
            if not words
            else Shard(*words)
            if len(words) == 1
            else _StridedShard(words[0], split_factor=words[1])
            for words in layout.placements
        ]
        shape, _ = compute_local_shape_and_global_offset(whole, mesh, placements)
        local = torch.empty(tuple(shape), dtype=dtype, device=device)
        strides = torch.empty(whole, device="meta").stride()
        made: torch.Tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(whole), stride=strides
        )
        return made


@dataclass
class TensorCollector:
    """Collects the tensors that the encoding of a state leaves out."""

    tensors: list[torch.Tensor] = field(default_factory=list)  # this rank's parts, in the order of collection
    scope: Scope = "replicated"  # scope of the tensors that are collected next
    made_anew: bool = True  # whether a restore creates the tensors that are collected next, knowing only what is saved
    layouts: list[ShardLayout] = field(default_factory=list)  # layouts of the sharded tensors
    holders: frozenset[int] = frozenset()  # ranks that hold the same parts of all sharded tensors; empty without any
    entries: list[TensorEntry] = field(default_factory=list)  # the table of the collected tensors
    _end: int = 0
    _keys: set[str] = field(default_factory=set)
    _known: dict[Any, tuple[int, frozenset[int]]] = field(default_factory=dict)

    def __call__(self, value: Any, path: Path) -> int:
        """Collect a tensor or numpy array. Returns its number."""
        key = dotted(path)
        if key in self._keys:
            raise SettingsError(f"two tensors of the state are both named {key}: rename a field or a key")
        self._keys.add(key)
        tensor = value if isinstance(value, torch.Tensor) else byte_tensor(bytearray(value.tobytes()))
        _check_plain(key, tensor, self.made_anew)
        local, starts = local_box(tensor)
        if is_sharded(tensor):
            _check_plain(key, local, made_anew=True)
        if _overlaps(local) and (not self.made_anew or len(path) == 1 or is_trained(tensor)):
            raise SettingsError(
                f"{key} is an expanded tensor, whose elements share memory, so that it cannot be restored in place: "
                "make it with expand(...).clone()"
            )
        scope: Scope = "shard" if is_sharded(tensor) and self.scope == "replicated" else self.scope
        dtype = str(local.dtype).removeprefix("torch.")
        place = (tuple(local.shape), tuple(tensor.shape), starts)
        layout, holders = self._layout_of(tensor)
        if scope == "shard":
            self.holders = self.holders & holders if self.holders else holders
        entry = TensorEntry(key, dtype, *place, scope, self._end, local.nbytes, local.device.type, layout)
        self._end += -(-local.nbytes // ALIGN) * ALIGN
        self.entries.append(entry)
        self.tensors.append(local)
        return len(self.tensors) - 1

    def _layout_of(self, tensor: Any) -> tuple[int, frozenset[int]]:
        """Return the number of a tensor's layout, -1 if it is not sharded, and the ranks that hold the same part."""
        if not is_sharded(tensor):
            return -1, frozenset()
        known = (tensor.device_mesh, tensor.placements)
        if known not in self._known:
            self._known[known] = len(self.layouts), shard_holders(tensor)
            self.layouts.append(shard_layout(tensor))
        return self._known[known]


def _check_plain(key: str, tensor: torch.Tensor, made_anew: bool) -> None:
    """Check that a tensor consists of nothing but its bytes."""
    if is_lazy(tensor):
        raise SettingsError(f"{key} has no shape yet: run a batch through its module before the state is saved")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        what = "nested" if tensor.is_nested else tensor.layout
        raise SettingsError(f"{key} is a {what} tensor on {tensor.device}: only dense tensors can be saved")
    kind = type(tensor)
    own_bytes = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_sharded(tensor) and (not own_bytes or (made_anew and kind not in (torch.Tensor, torch.nn.Parameter))):
        raise SettingsError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, which would be restored as a plain tensor: save the "
            "plain tensors that it consists of, or an object with state_dict() and load_state_dict()"
        )


def view_of(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that `entry` describes in `data` (uint8, flat), sharing its memory."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or entry.nbytes != entry.numel * dtype.itemsize:
        raise ProtocolError(f"{entry.key}: {entry.nbytes} bytes of {entry.dtype} for the shape {entry.shape}")
    if entry.offset + entry.nbytes > data.numel():
        raise ProtocolError(f"{entry.key} ends beyond the {data.numel()} bytes of its state")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return data[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


@dataclass
class RestoreTarget:
    """A tensor to fill, part by part."""

    key: str  # name of the tensor in the state
    value: torch.Tensor  # tensor that the state gets in the end; a `DTensor` if `local` is a part of it
    local: torch.Tensor  # tensor to which parts are copied; never memory of a slot
    starts: Shape  # indices in the whole tensor at which `local` begins
    missing: int  # number of elements that are not filled yet

    def fill_part(self, starts: Shape, part: torch.Tensor) -> None:
        """Copy the region that belongs here from `part`, which begins at `starts` in the whole tensor."""
        # Only in its own mode does torch write to a tensor that was made in `inference_mode`.
        with torch.inference_mode() if self.local.is_inference() else torch.no_grad():
            if not self.local.dim():
                self.local.copy_(part)
                self.missing = 0
                return
            common = box_overlap(self.starts, self.local.shape, starts, part.shape)
            if common is not None:
                mine = self.local[common[0]]
                mine.copy_(part[common[1]])
                self.missing -= mine.numel()


@dataclass(frozen=True)
class LiveTensors:
    """Live tensors, by key, of a state into which another state is restored."""

    in_place: Mapping[str, torch.Tensor]  # tensors that are filled in place
    alike: Mapping[str, torch.Tensor]  # tensors that are replaced by new ones like them
    parameters: Mapping[str, torch.Tensor]  # by their optimizer state's keys less the last part; sharded alike
    meshes: LiveMeshes  # meshes over which any of these is sharded

    def restore_target(self, entry: TensorEntry, layout: ShardLayout | None) -> RestoreTarget:
        value = self._value(entry, layout)
        local, starts = local_box(value)
        return RestoreTarget(entry.key, value, local, starts, local.numel())

    def _value(self, entry: TensorEntry, layout: ShardLayout | None) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"{entry.key}: torch has no dtype {entry.dtype!r}")
        live = _fitting(entry, self.in_place.get(entry.key))
        if live is not None and live.dtype == dtype:
            if live.is_meta:
                raise SettingsError(
                    f"{entry.key} is on the meta device, where nothing is restored: call to_empty() first"
                )
            if not is_sharded(live) and _overlaps(live):  # what replaced it later was saved
                live.data = torch.empty(live.shape, dtype=dtype, device=live.device)
            return live
        parameter = _fitting(entry, self.parameters.get(entry.key.rpartition(".")[0]))
        like = _fitting(entry, self.alike.get(entry.key))
        for fitting in (parameter, like):
            if fitting is not None and is_sharded(fitting):
                return torch.empty_like(fitting, dtype=dtype, requires_grad=False)
        if layout is not None and parameter is None:
            made = self.meshes.empty_tensor(layout, entry.whole, dtype, _device(entry))
            if made is not None:
                return made
            if like is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise SettingsError(f"{entry.key} cannot be restored: {_NO_MESH.format(layout=layout)}")
        fitting = like if parameter is None else parameter
        device = _device(entry) if fitting is None or fitting.is_meta else fitting.device
        return torch.empty(entry.whole, dtype=dtype, device=device)


def _fitting(entry: TensorEntry, tensor: torch.Tensor | None) -> torch.Tensor | None:
    fits = tensor is not None and not is_lazy(tensor) and tuple(tensor.shape) == entry.whole
    return tensor if fits else None


_NO_MESH = (
    "it was sharded over a mesh of {layout.mesh_shape} ranks (dimensions: {layout.names}), over which nothing in the "
    "State is sharded when restore() is called. Create the tensor before restore(), or give the State the module that "
    "uses this mesh"
)


def unrestorable_error(entry: TensorEntry, layout: ShardLayout) -> SettingsError:
    return SettingsError(f"{entry.key} could be saved, but not restored: {_NO_MESH.format(layout=layout)}")


def _device(entry: TensorEntry) -> torch.device:
    """Return this process's device of the type on which a tensor was saved, or else the CPU."""
    here = None if entry.device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return here if here is not None and here.type == entry.device else torch.device("cpu")
