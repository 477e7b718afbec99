"""Tensors on their way between a live state and a snapshot: what is taken out, and where it goes back to.

A sharded tensor (`DTensor`) is taken as this rank's part, with its place in the whole. Going back, every part fills
what it has in common with the tensor that wants it, whoever saved the part and however many ranks there were.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from edl.collective.checkpoint.encoding import Path, dotted
from edl.collective.checkpoint.snapshot import Entry, Scope, lay_out, overlap
from edl.errors import ProtocolError, SettingsError

__all__ = ["Gathered", "Target", "box_of", "is_sharded", "view_of"]

Shape = tuple[int, ...]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def box_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Shape]:
    """The part of a tensor that this rank holds, and where it begins in the whole."""
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


@dataclass
class Gathered:
    """Takes aside what the encoding of a state leaves out."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    _rows: list[tuple[str, str, Shape, Shape, Shape, Scope, int]] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)
    scope: Scope = "replicated"

    def __call__(self, value: Any, path: Path) -> int:
        """Take a tensor or numpy array. Returns its number."""
        key = dotted(path)
        if key in self._keys:
            raise SettingsError(f"two tensors of the state are both named {key}: rename a field or a key")
        self._keys.add(key)
        tensor = value if isinstance(value, torch.Tensor) else _bytes_of(value)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise SettingsError(f"{key} is a {tensor.layout} tensor on {tensor.device}: only dense ones can be saved")
        local, starts = box_of(tensor)
        scope: Scope = "shard" if is_sharded(tensor) and self.scope == "replicated" else self.scope
        dtype = str(local.dtype).removeprefix("torch.")
        self._rows.append((key, dtype, tuple(local.shape), tuple(tensor.shape), starts, scope, local.nbytes))
        self.tensors.append(local)
        return len(self.tensors) - 1

    def entries(self) -> tuple[Entry, ...]:
        """The table of what was taken."""
        offsets = lay_out([row[-1] for row in self._rows])
        return tuple(Entry(*row[:-1], offset, row[-1]) for row, offset in zip(self._rows, offsets, strict=True))


def _bytes_of(array: Any) -> torch.Tensor:
    """A numpy array's bytes, row-major, in memory of their own."""
    return (
        torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        if array.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )


def view_of(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor of `entry` in `data` (uint8), sharing its memory.

    Raises:
        ProtocolError: it lies outside, or its sizes contradict its type.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype) or entry.nbytes != entry.numel * dtype.itemsize:
        raise ProtocolError(f"{entry.key}: {entry.nbytes} bytes of {entry.dtype} for the shape {entry.shape}")
    if entry.offset + entry.nbytes > data.numel():
        raise ProtocolError(f"{entry.key} ends behind the {data.numel()} bytes of its state")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return data[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


@dataclass
class Target:
    """A tensor to be filled, part by part.

    Attributes:
        key: its name in the state.
        value: what the state gets in the end; a `DTensor` where `local` is a part of one.
        local: where parts are copied to, never memory of a slot.
        starts: where `local` begins in the whole.
        missing: elements not filled yet.
    """

    key: str
    value: torch.Tensor
    local: torch.Tensor
    starts: Shape
    missing: int

    @classmethod
    def of(cls, entry: Entry, live: torch.Tensor | None, template: torch.Tensor | None) -> Target:
        """Where the tensor of `entry` goes: into `live` if it fits, else into new memory, sharded like `template`."""
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"{entry.key}: torch has no type {entry.dtype!r}")
        if live is not None and live.dtype == dtype and tuple(live.shape) == entry.whole:
            value = live
        elif template is not None and is_sharded(template) and tuple(template.shape) == entry.whole:
            value = torch.empty_like(template, dtype=dtype, requires_grad=False)
        else:
            value = torch.empty(entry.whole, dtype=dtype)
        local, starts = box_of(value)
        return cls(entry.key, value, local, starts, local.numel())

    @torch.no_grad()
    def fill(self, starts: Shape, part: torch.Tensor) -> None:
        """Take from `part`, which begins at `starts` of the whole, what belongs here."""
        if not self.local.dim():
            self.local.copy_(part)
            self.missing = 0
            return
        common = overlap(self.starts, self.local.shape, starts, part.shape)
        if common is not None:
            mine = self.local[common[0]]
            mine.copy_(part[common[1]])
            self.missing -= mine.numel()
