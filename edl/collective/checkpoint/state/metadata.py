"""Metadata of a saved state: the tree of plain values, and a table of the tensors.

Slots, storage and messages to other ranks use the same metadata. The entry of a sharded tensor says where its part
belongs in the whole, so that a world of another size can put the parts together. Uses neither I/O nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from edl.collective.checkpoint.encoding import from_json, to_json
from edl.errors import ProtocolError

ALIGN: Final = 64
"""Tensors begin at multiples of this many bytes: a cache line, and enough alignment for every type."""

_FORMAT: Final = 1  # a state with another number is refused, because this version could not read it

Scope = Literal["replicated", "shard", "local"]


@dataclass(frozen=True)
class ShardLayout:
    """How a sharded tensor was distributed over the ranks that saved it."""

    names: tuple[str, ...] | None  # names of the mesh's dimensions, None if they have none
    mesh_shape: tuple[int, ...]  # shape of the mesh
    ranks: tuple[int, ...]  # ranks in the mesh, row-major
    # One tuple for each dimension of the mesh. It is empty for a replica; otherwise it has the tensor dimension that is
    # sharded and, if shards are not in the order of ranks, torch's split factor.
    placements: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, or a rank's part of a sharded tensor."""

    key: str  # where it is in the state, with dots: `model.layer.weight`
    dtype: str  # torch's name of the dtype, without `torch.`
    shape: tuple[int, ...]  # shape of this part
    whole: tuple[int, ...]  # shape of the whole tensor; the same as `shape` unless this is a shard
    starts: tuple[int, ...]  # indices in the whole tensor at which this part begins
    # `replicated` if it is the same on all ranks, `shard` for a rank's part of a whole, `local` if it belongs to one
    # rank alone
    scope: Scope
    offset: int  # offset of its bytes in the data; they are row-major
    nbytes: int  # number of its bytes
    device: str = "cpu"  # type of the device that it was on
    layout: int = -1  # number of its `ShardLayout` in the metadata, -1 for a tensor that is not sharded

    @property
    def numel(self) -> int:
        """The number of elements of this part."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StateMetadata:
    """Parsed metadata."""

    kinds: dict[str, str]  # kind of each field: `module`, `optimizer`, `object` or `value`
    tree: dict[str, Any]  # encoded fields that all ranks share, by name
    local: dict[str, Any]  # encoded fields that belong to one rank alone, by name
    entries: tuple[TensorEntry, ...]  # tensors; the encoded fields refer to them by number
    layouts: tuple[ShardLayout, ...] = ()  # layouts of the sharded tensors
    holders: tuple[int, ...] = ()  # global ranks that hold the same shards as the rank that saved this
    # Names of fields that belong to one rank alone and must not be lost, such as a position in a stream
    per_rank: frozenset[str] = frozenset()

    @property
    def data_nbytes(self) -> int:
        """Length in bytes of the data that contains the tensors."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold parts that are missing here."""
        return bool(self.per_rank) or any(entry.scope == "shard" for entry in self.entries)


def tensor_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of tensors of `sizes` bytes that follow one another, aligned to `ALIGN`."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    return offsets


def pack_table(
    entries: Sequence[TensorEntry], layouts: Sequence[ShardLayout] = (), holders: Sequence[int] = ()
) -> bytes:
    """Return the table as JSON, without braces: the part of the metadata that is the same from step to step."""
    rows = [
        [e.key, e.dtype, e.shape, e.whole, e.starts, e.scope, e.offset, e.nbytes, e.device, e.layout] for e in entries
    ]
    forms = [[layout.names, layout.mesh_shape, layout.ranks, layout.placements] for layout in layouts]
    return b'"tensors":%b,"layouts":%b,"holders":%b' % (to_json(rows), to_json(forms), to_json(holders))


def pack_meta(
    kinds: dict[str, str], tree: dict[str, bytes], local: dict[str, bytes], table: bytes, per_rank: Iterable[str] = ()
) -> bytes:
    """Return the metadata, made from encoded fields and a packed table."""
    parts = (to_json(kinds), _join(tree), _join(local), to_json(sorted(per_rank)), table)
    return b'{"format":%d,"kinds":%b,"tree":%b,"local":%b,"per_rank":%b,%b}' % (_FORMAT, *parts)


def _join(fields: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (to_json(name), form) for name, form in fields.items())


def parse_meta(data: bytes) -> StateMetadata:
    """Parse metadata."""
    return read_meta(from_json(data))


def read_meta(form: Any) -> StateMetadata:
    """Parse metadata whose JSON is already parsed."""
    if not isinstance(form, dict) or form.get("format") != _FORMAT:
        raise ProtocolError(f"metadata of a state of another format than {_FORMAT}: another version of EDL saved it")
    try:
        entries = tuple(map(_entry, form["tensors"]))
        layouts = tuple(map(_layout, form.get("layouts", [])))
        holders = tuple(map(int, form.get("holders", [])))
        per_rank = frozenset(map(str, form.get("per_rank", [])))
        meta = StateMetadata(
            dict(form["kinds"]), dict(form["tree"]), dict(form["local"]), entries, layouts, holders, per_rank
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"metadata of a state cannot be read: {exc!r}") from exc
    for entry in entries:
        if not _holds_together(entry) or entry.layout >= len(layouts):
            raise ProtocolError(f"metadata of a state has an impossible tensor: {entry}")
    return meta


def _entry(row: Sequence[Any]) -> TensorEntry:
    """Parse a row of the table; earlier versions of EDL wrote rows without the last two columns."""
    key, dtype, shape, whole, starts, scope, offset, nbytes, *more = row
    device, layout = more or ("cpu", -1)
    place = (tuple(shape), tuple(whole), tuple(starts))
    return TensorEntry(str(key), str(dtype), *place, scope, int(offset), int(nbytes), str(device), int(layout))


def _layout(row: Sequence[Any]) -> ShardLayout:
    names, mesh_shape, ranks, placements = row
    words = tuple(tuple(map(int, placement)) for placement in placements)
    return ShardLayout(None if names is None else tuple(names), tuple(mesh_shape), tuple(map(int, ranks)), words)


def _holds_together(entry: TensorEntry) -> bool:
    sizes = (*entry.shape, *entry.whole, *entry.starts, entry.offset, entry.nbytes)
    return (
        len(entry.shape) == len(entry.whole) == len(entry.starts)
        and all(isinstance(size, int) and size >= 0 for size in sizes)
        and all(begin + size <= all_ for begin, size, all_ in zip(entry.starts, entry.shape, entry.whole, strict=True))
        and entry.scope in ("replicated", "shard", "local")
        and (entry.nbytes == 0 if entry.numel == 0 else entry.nbytes % entry.numel == 0)
    )


def box_overlap(
    starts: Sequence[int], shape: Sequence[int], other_starts: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Intersect two boxes of a tensor.

    Returns:
        The common part as slices of the first and of the second box, or None if they do not overlap.
    """
    mine, theirs = [], []
    for start, size, other_start, other_size in zip(starts, shape, other_starts, other_shape, strict=True):
        begin, end = max(start, other_start), min(start + size, other_start + other_size)
        if begin >= end:
            return None
        mine.append(slice(begin - start, end - start))
        theirs.append(slice(begin - other_start, end - other_start))
    return tuple(mine), tuple(theirs)
