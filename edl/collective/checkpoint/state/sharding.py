"""How a `DTensor` lies over the ranks: which part this rank holds, who holds the same, and how it is made again.

A module or an optimizer has its sharded tensors when a state is restored, and they are filled where they are. Averaged
weights that a script clones in its first step, or the state of an optimizer of its own, do not exist yet in a process
that was just restarted: those are made again as they were saved, over a mesh that the live state uses.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from edl.collective.checkpoint.encoding import MAX_DEPTH, Path, dotted
from edl.collective.checkpoint.state.snapshot import ShardLayout
from edl.errors import SettingsError

__all__ = ["LiveMeshes", "local_box", "shard_holders", "is_sharded", "shard_layout", "walk_tensors"]

Shape = tuple[int, ...]


def is_sharded(tensor: object) -> bool:
    """Whether this is a `DTensor`."""
    # Another thread, such as the one that stores, may be just importing it: then there is no such tensor yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_box(tensor: torch.Tensor) -> tuple[torch.Tensor, Shape]:
    """The part of a tensor that this rank holds, and where it begins in the whole.

    Raises:
        SettingsError: the parts do not make the whole.
    """
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    if any(placement.is_partial() for placement in whole.placements):
        raise SettingsError("a DTensor with partial sums cannot be saved: redistribute it first")
    shape, starts = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    local = whole.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise SettingsError(f"a DTensor's part has the shape {tuple(local.shape)} where {tuple(shape)} is expected")
    return local, tuple(int(start) for start in starts)


def shard_layout(tensor: Any) -> ShardLayout:
    """How a `DTensor` lies over the ranks, in words that make another one like it."""
    mesh = tensor.device_mesh
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return ShardLayout(names, tuple(mesh.mesh.shape), ranks, tuple(_words_of(one) for one in tensor.placements))


def _words_of(placement: Any) -> tuple[int, ...]:
    """Nothing for a replica, the dimension of a shard, and with FSDP over tensor parallelism its split factor."""
    if placement.is_replicate():
        return ()
    if placement.is_shard():
        return (int(placement.dim),)
    if hasattr(placement, "split_factor"):
        return (int(placement.dim), int(placement.split_factor))
    raise SettingsError(f"a DTensor with the placement {placement!r} cannot be saved: redistribute it to Shard first")


def shard_holders(tensor: Any) -> frozenset[int]:
    """The global ranks that hold the same part of a `DTensor` as this rank: more than one in HSDP."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return frozenset({dist.get_rank()})
    index = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(tensor.placements, place, strict=True)
    )
    return frozenset(int(rank) for rank in mesh.mesh[index].flatten().tolist())


def walk_tensors(form: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers with their `TensorCollector` keys, as deep as can be saved."""
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
        """The meshes of those of `tensors` that are sharded."""
        self._meshes: dict[Any, ShardLayout] = {}
        for tensor in tensors:
            if is_sharded(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                if mesh not in self._meshes:
                    self._meshes[mesh] = shard_layout(tensor)

    def find_mesh(self, layout: ShardLayout) -> Any:
        """The mesh with the same ranks, or else the same shape, or else as many dimensions; None if there is none.

        Dimensions of meshes that have names must have the same ones.
        """
        alike = [
            (own.ranks == layout.ranks, own.mesh_shape == layout.mesh_shape, mesh)
            for mesh, own in self._meshes.items()
            if own.names == layout.names and len(own.mesh_shape) == len(layout.mesh_shape)
        ]
        return max(alike, key=lambda found: found[:2])[2] if alike else None

    def empty_tensor(
        self, layout: ShardLayout, whole: Shape, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """A new tensor of the shape `whole` that lies over the ranks as `layout` says; None where no mesh matches."""
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
