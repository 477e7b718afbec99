"""Tensors in the files of `torch.distributed.checkpoint` (DCP), written without a process group, read without pickle.

A tensor is an item of a file in the format of `torch.save`: a zip archive with the raw bytes in its record `data/0`.
DCP's `.metadata`, a pickle, says where the items are. It is written for scripts that use `dcp.load`, but never read
here.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from edl.collective.checkpoint.encoding import StateMetadata, TensorEntry, decode, parse_meta, read_meta
from edl.collective.checkpoint.memory.slots import SlotCopy
from edl.collective.checkpoint.state.tensors import view_of
from edl.collective.checkpoint.storage.folder import ChecksumWriter, RankManifest
from edl.collective.ranks import byte_tensor
from edl.errors import ProtocolError

_VERSION = "1.0.0"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a record in a zip archive, up to the lengths of name and extra field


def write_rank_file(copy: SlotCopy, stream: ChecksumWriter) -> dict[str, Any]:
    """Write a rank's part (rank 0's includes what all share). Returns the manifest's `tensors`, `values`, `paths`."""
    meta = parse_meta(copy.meta)
    first = copy.header.rank == 0
    flat, paths = _flatten_fields(meta, copy) if first else ({}, {})
    values = {key: _write_item(value, stream) for key, value in flat.items() if not isinstance(value, torch.Tensor)}
    tensors = {
        entry.key: _write_item(_slot_tensor(copy, entry), stream)
        for entry in meta.entries
        if first or entry.scope != "replicated"
    }
    return {"tensors": tensors, "values": values, "paths": paths}


def _write_item(value: Any, stream: ChecksumWriter) -> tuple[int, int]:
    begin = stream.tell()
    torch.save(value, stream)  # type: ignore[arg-type]  # an object with write() is enough
    return begin, stream.tell() - begin


def _slot_tensor(copy: SlotCopy, entry: TensorEntry) -> torch.Tensor:
    """Return a slot's tensor in a torch storage of its own, because `torch.save` writes a tensor's whole storage."""
    if not entry.nbytes:
        return view_of(torch.empty(0, dtype=torch.uint8), replace(entry, offset=0))
    own = torch.frombuffer(copy.data, dtype=torch.uint8, offset=entry.offset, count=entry.nbytes)
    return view_of(own, replace(entry, offset=0))


def _flatten_fields(meta: StateMetadata, copy: SlotCopy) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the shared fields, flattened as in DCP, and their paths."""
    tree = {
        name: decode(form, lambda number: _slot_tensor(copy, meta.entries[number])) for name, form in meta.tree.items()
    }
    flat: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for name, value in tree.items():
        try:
            fields, field_paths = flatten_state_dict({name: value})
        except ValueError:  # two keys are equal as strings
            fields, field_paths = {name: value}, {name: (name,)}
        flat.update(fields)
        paths.update(field_paths)
    return flat, paths


def pack_dcp_metadata(pieces: Iterable[RankManifest]) -> bytes:
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for piece in pieces:
        for key, (offset, length) in piece.values.items():
            described[key] = BytesStorageMetadata()
            stored[MetadataIndex(key)] = _StorageInfo(piece.file, offset, length)
        paths.update(piece.paths)
        for entry in read_meta(piece.meta).entries:
            if entry.key in piece.tensors and not isinstance(described.get(entry.key), BytesStorageMetadata):
                _describe_tensor(piece, entry, described, stored, paths)
    whole = Metadata(described, planner_data=paths, storage_data=stored)
    if hasattr(whole, "version"):
        whole.version = _VERSION
    return pickle.dumps(whole)


def _describe_tensor(
    piece: RankManifest,
    entry: TensorEntry,
    described: dict[str, Any],
    stored: dict[MetadataIndex, _StorageInfo],
    paths: dict[str, tuple[Any, ...]],
) -> None:
    key = f"rank-{piece.rank}.{entry.key}" if entry.scope == "local" else entry.key
    index = MetadataIndex(key, entry.starts)
    if index in stored or (not entry.numel and 0 not in entry.whole):
        return  # another rank stores the same part, or this rank holds nothing of the tensor
    paths.setdefault(key, (key,))
    dtype = getattr(torch, entry.dtype)
    whole = described.setdefault(key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry.whole), []))
    stored[MetadataIndex(key, entry.starts, len(whole.chunks))] = _StorageInfo(piece.file, *piece.tensors[entry.key])
    whole.chunks.append(ChunkStorageMetadata(torch.Size(entry.starts), torch.Size(entry.shape)))


def read_tensor(item: memoryview, entry: TensorEntry, *, check: bool) -> torch.Tensor:
    """Return the tensor in an item of a file. It shares the item's memory if the alignment allows."""
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            records = {info: _find_record(item, info) for info in archive.infolist()}
        found = next(info for info in records if info.filename.endswith("/data/0"))
    except (zipfile.BadZipFile, StopIteration, EOFError, OSError, struct.error, NotImplementedError) as exc:
        raise ProtocolError(f"{entry.key} cannot be read from its file: {exc!r}") from exc
    if check and any(zlib.crc32(record) != info.CRC for info, record in records.items()):
        raise ProtocolError(f"{entry.key} has changed since it was written")
    data = records[found]
    if len(data) != entry.nbytes:
        raise ProtocolError(f"{entry.key} has {len(data)} bytes in its file, but its metadata says {entry.nbytes}")
    flat = byte_tensor(data)
    dtype = getattr(torch, entry.dtype, None)
    if isinstance(dtype, torch.dtype) and flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # torch.save aligns tensors only relative to their item
    return view_of(flat, replace(entry, offset=0))


def _find_record(item: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of an uncompressed record, which follow its header, name and extra field."""
    name, extra = _LOCAL_HEADER.unpack_from(item, info.header_offset)
    begin = info.header_offset + _LOCAL_HEADER.size + name + extra
    record = item[begin : begin + info.file_size]
    if info.compress_type != zipfile.ZIP_STORED or len(record) != info.file_size:
        raise zipfile.BadZipFile(f"{info.filename} is truncated, or compressed")
    return record
