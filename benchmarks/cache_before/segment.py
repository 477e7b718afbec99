"""Reads and encodes a file of rows, in the safetensors format (https://github.com/huggingface/safetensors#format).

A file holds the ids (`sample_ids` int64 [rows], or as UTF-8 text `sample_ids.utf8` with `sample_ids.ends`) and a tensor
[rows, ...] per column, so that any reader of safetensors can read it. Files never change: they are renamed into place
whole, and deleted.

Disks, and what lies between, flip bits. `sample_ids.crc32` has a checksum (uint32) of each row's record, and the
metadata have a checksum of the ids, these checksums and the layout (`crc32`), which is verified when the file is
opened. A row's is verified when it is first read: every time would double the time that wide rows in the page cache
take. Files of format 1 have none, and are read without.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.cache_before.layout import ID_PREFIX, Column, RowLayout
from benchmarks.cache_before.memory import SampleId
from edl.protocol.tensors import Array

__all__ = ["BadSegmentError", "FileHandles", "Segment", "encode", "read_small"]

_FORMAT, _UNCHECKED = "edl-soft-labels/2", "edl-soft-labels/1"
_SEQUENCES = "edl-soft-labels/3"
"""Of sequences, each with rows of its own number. A name of their own, so that older versions of EDL leave such files
out and do not take their rows for those of samples."""
_LENGTHS, _PRINTS = f"{ID_PREFIX}.lengths", f"{ID_PREFIX}.fingerprints"
_MOST_AXES = 32  # numpy's arrays have no more
_SUMS = f"{ID_PREFIX}.crc32"
_LARGEST_HEADER = 16 << 20
"""Bytes of a header: ours have a few hundred; a damaged length must not become an allocation of gigabytes."""
_LARGEST_IDS = 256 << 20
"""Bytes of a file's ids and checksums. Ours have a hundredth of that; a sparse file may claim more than the RAM."""
_GONE = {errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG}
"""Errors that say something about the file itself. Others, such as EMFILE or EIO, may be over at the next attempt."""
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


class BadSegmentError(Exception):
    """Raised for a file that is torn, foreign or gone. Does not leave this package.

    Attributes:
        may_pass: whether the file itself may be right: it could not be read now, for want of descriptors, say.
    """

    def __init__(self, why: str, *, may_pass: bool = False) -> None:
        super().__init__(why)
        self.may_pass = may_pass


def encode(namespace: str, layout: RowLayout, ids: Sequence[SampleId], records: Sequence[bytes]) -> bytes:
    """Return a file's bytes.

    Args:
        namespace: name of its folder.
        layout: of the rows.
        ids: [records], either all integers or all strings.
        records: of rows or of sequences, as the layout has them.
    """
    if layout.sequence_inputs is None:
        tensors = layout.unpack(b"".join(records), len(records))
    else:
        tensors, lengths, prints = layout.unpack_sequences(records)
        tensors |= {_LENGTHS: lengths, _PRINTS: prints}
    if isinstance(ids[0], int):
        tensors[ID_PREFIX] = np.array(ids, np.int64)
    else:
        texts = [str(sample).encode() for sample in ids]
        tensors[f"{ID_PREFIX}.utf8"] = np.frombuffer(b"".join(texts), np.uint8)
        tensors[f"{ID_PREFIX}.ends"] = np.cumsum([len(text) for text in texts], dtype=np.int64)
    tensors[_SUMS] = np.fromiter(map(zlib.crc32, records), np.uint32, len(records))
    about = {name: tensor for name, tensor in tensors.items() if name.startswith(ID_PREFIX)}
    top_k = json.dumps(dict(layout.top_k), sort_keys=True)
    stored = RowLayout(layout.columns, _top_k_in(top_k), layout.sequence_inputs)  # as who opens the file has it
    metadata = {"format": _FORMAT, "namespace": namespace, "top_k": top_k, "crc32": _sum_of(about, stored)}
    if layout.sequence_inputs is not None:
        metadata |= {"format": _SEQUENCES, "sequence_inputs": json.dumps(layout.sequence_inputs)}
    return safetensors.numpy.save(tensors, metadata)


def _top_k_in(text: str) -> dict[str, tuple[float, int | None]]:
    found = {name: (float(value[0]), value[1]) for name, value in json.loads(text).items()}
    for name, (_, classes) in found.items():
        if classes is not None and type(classes) is not int:
            raise ValueError(f"output {name!r} has {classes!r:.50} classes")
    return found


def _sum_of(about: Mapping[str, Array], layout: RowLayout) -> str:
    """Return a checksum of all that says what the rows are and whose, but for their bytes."""
    total = zlib.crc32(f"{layout} {sorted(layout.top_k.items())}".encode())
    for name, array in sorted(about.items()):
        total = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def open_regular(path: Path) -> int:
    """Return a descriptor to read a file with.

    Raises:
        OSError: it cannot be opened, or is no regular file: to open a FIFO, or to read a terminal, could take for ever.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_small(path: Path, most: int) -> bytes:
    """Return a file's first bytes, `most` at most.

    Raises:
        OSError: as `open_regular`.
    """
    fd = open_regular(path)
    try:
        return os.read(fd, most)
    finally:
        os.close(fd)


class FileHandle:
    """An open file that closes when it is no longer held, be it in the middle of another thread's read."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1  # `open` may fail
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class FileHandles:
    """A bounded number of open files, the least recently used closed first.

    Args:
        most: files open at a time.
    """

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._open: OrderedDict[Path, FileHandle] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> FileHandle:
        """Return the open file; hold it while using its descriptor."""
        with self._lock:
            handle = self._open.get(path)
            if handle is None:
                handle = self._open[path] = FileHandle(path)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(path)
            return handle

    def drop(self, path: Path) -> None:
        """Close a file, if it is open."""
        with self._lock:
            self._open.pop(path, None)

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            self._open.clear()


@dataclass(frozen=True, eq=False)
class Segment:
    """A file that was found whole.

    Attributes:
        path: of the file.
        ids: [records].
        layout: of the records.
        stops: of sequences, int64 [ids]: behind the last row of each in the columns; None where an id has one row.
        offsets: by column of the layout, where its tensor starts in the file.
        sums: uint32 [records], the records' checksums; None in an old file.
        checked: by record 1 once it was found right.
        prints: of sequences, the fingerprints, 8 bytes each; else empty.
    """

    path: Path
    ids: list[SampleId]
    layout: RowLayout
    stops: Array | None
    offsets: tuple[int, ...]
    sums: Array | None
    checked: bytearray
    prints: bytes

    @classmethod
    def open(cls, path: Path, namespace: str, handles: FileHandles) -> Segment:
        """Read the header and the ids.

        Raises:
            BadSegmentError: it is no whole file of this namespace.
        """
        try:
            handle = handles.get(path)
            size = os.fstat(handle.fd).st_size
            header, start = _header(handle, size)
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict):
                raise BadSegmentError("it was not written by EDL")
            if metadata.get("format") not in (_FORMAT, _UNCHECKED, _SEQUENCES):
                raise BadSegmentError("it was not written by EDL")
            if metadata.get("namespace") != namespace:
                raise BadSegmentError(f"it belongs to {metadata.get('namespace')!r}")
            tensors = {name: _Tensor.of(name, entry, start, size) for name, entry in header.items()}
            _check_places(tensors, start, size)
            if sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(ID_PREFIX)) > _LARGEST_IDS:
                raise BadSegmentError(f"its ids are said to take more than {_LARGEST_IDS} bytes")
            about = {
                name: np.frombuffer(_read(handle, tensor.offset, tensor.nbytes), tensor.dtype)
                for name, tensor in tensors.items()
                if name.startswith(ID_PREFIX)
            }
            ids = _ids_in(about)
            of_sequences = metadata["format"] == _SEQUENCES
            stops = _stops_in(about, len(ids)) if of_sequences else None
            rows = len(ids) if stops is None else int(stops[-1])
            columns = sorted(name for name in tensors if not name.startswith(ID_PREFIX))
            for name in columns:
                if tensors[name].shape[:1] != (rows,):
                    raise BadSegmentError(f"tensor {name!r} has shape {tensors[name].shape} for {rows} rows")
            layout = RowLayout(
                tuple(Column(name, tensors[name].dtype, tensors[name].shape[1:]) for name in columns),
                _top_k_in(metadata["top_k"]),
                _names_in(metadata["sequence_inputs"]) if of_sequences else None,
            )
            _check_layout(layout)
            sums = about.get(_SUMS)
            checked = metadata["format"] != _UNCHECKED or sums is not None
            if checked and (sums is None or len(sums) != len(ids) or _sum_of(about, layout) != metadata.get("crc32")):
                raise BadSegmentError("it is damaged: its ids or its header are not those that were written")
            offsets = tuple(tensors[name].offset for name in columns)
            prints = about[_PRINTS].tobytes() if of_sequences else b""
            return cls(path, ids, layout, stops, offsets, sums, bytearray(len(ids)), prints)
        except OSError as exc:
            raise _unreadable(exc) from exc
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise BadSegmentError(f"its header makes no sense: {exc!r:.200}") from exc
        except MemoryError as exc:
            raise BadSegmentError("its header and ids do not fit into memory", may_pass=True) from exc

    def read(self, handles: FileHandles, start: int, count: int) -> list[bytes | None]:
        """Return `count` records from record `start` on, None for damaged records.

        Raises:
            BadSegmentError: the file is gone, or shorter than it was.
        """
        records = self._records(handles, start, count) if self.stops is None else self._sequences(handles, start, count)
        if self.sums is None or self.checked.find(0, start, start + count) < 0:
            return [*records]
        is_right = bytes(map(operator.eq, map(zlib.crc32, records), self.sums[start : start + count].tolist()))
        self.checked[start : start + count] = is_right
        return [record if right else None for record, right in zip(records, is_right, strict=True)]

    def head(self, record: int) -> tuple[int, bytes]:
        """Return the rows and the fingerprint of a sequence, as the file has them, without reading it."""
        assert self.stops is not None
        begin = int(self.stops[record - 1]) if record else 0
        return int(self.stops[record]) - begin, self.prints[8 * record : 8 * record + 8]

    def _columns(self, handles: FileHandles, start: int, count: int) -> list[bytes]:
        """Return the bytes of `count` rows from row `start` on, by column."""
        widths = [column.nbytes for column in self.layout.columns]
        try:
            handle = handles.get(self.path)
            return [
                _read(handle, offset + start * width, count * width)
                for offset, width in zip(self.offsets, widths, strict=True)
            ]
        except OSError as exc:
            raise _unreadable(exc) from exc
        except MemoryError as exc:
            raise BadSegmentError(f"{count} rows of it do not fit into memory", may_pass=True) from exc

    def _sequences(self, handles: FileHandles, start: int, count: int) -> list[bytes]:
        assert self.stops is not None
        first = int(self.stops[start - 1]) if start else 0
        stops = (self.stops[start : start + count] - first).tolist()
        parts = [memoryview(part) for part in self._columns(handles, first, stops[-1])]
        widths = [column.nbytes for column in self.layout.columns]
        records = []
        for at, (begin, stop) in enumerate(zip([0, *stops], stops, strict=False), start):
            pieces = [part[begin * width : stop * width] for part, width in zip(parts, widths, strict=True)]
            records.append(b"".join([self.prints[8 * at : 8 * at + 8], *pieces]))
        return records

    def _records(self, handles: FileHandles, start: int, count: int) -> list[bytes]:
        widths = [column.nbytes for column in self.layout.columns]
        parts = self._columns(handles, start, count)
        if count == 1:
            return [b"".join(parts)]
        if len(parts) == 1:
            return [parts[0][at : at + widths[0]] for at in range(0, len(parts[0]), widths[0])]
        columns = [
            np.frombuffer(part, np.uint8).reshape(count, width) for part, width in zip(parts, widths, strict=True)
        ]
        return [row.tobytes() for row in np.concatenate(columns, axis=1)]


@dataclass(frozen=True)
class _Tensor:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any], start: int, size: int) -> _Tensor:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if any(type(number) is not int for number in (*shape, begin, end)) or len(shape) > _MOST_AXES:
            raise BadSegmentError(f"the shape or the place of tensor {name!r:.200} makes no sense")
        if any(axis < 0 for axis in shape) or end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
            raise BadSegmentError(f"tensor {name!r} of {dtype} {list(shape)} is said to take {end - begin} bytes")
        if start + end > size:
            raise BadSegmentError(f"it is torn: tensor {name!r} ends at byte {start + end} of {size}")
        return cls(dtype, shape, start + begin, end - begin)


def _unreadable(exc: OSError) -> BadSegmentError:
    return BadSegmentError(exc.strerror or str(exc), may_pass=exc.errno not in _GONE)


def _check_places(tensors: Mapping[str, _Tensor], start: int, size: int) -> None:
    """Check that tensors fill the file and do not overlap, as the format has it: a label may be one sample's only."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            raise BadSegmentError(f"tensor {name!r:.200} begins at byte {tensor.offset}, and not at {at}")
        at += tensor.nbytes
    if at != size:
        raise BadSegmentError(f"it has {size} bytes, and its tensors end at byte {at}")


def _check_layout(layout: RowLayout) -> None:
    """Check that outputs can be made of a row.

    Raises:
        ValueError: they cannot.
        KeyError: likewise.
        TypeError: likewise.
    """
    if not layout.columns or not all(column.nbytes for column in layout.columns):
        raise ValueError("there is nothing in its rows")
    layout.restore(layout.unpack(bytes(layout.row_nbytes), 1))


def _header(handle: FileHandle, size: int) -> tuple[dict[str, Any], int]:
    if size < 8:
        raise BadSegmentError(f"it is torn: {size} bytes")
    (length,) = struct.unpack("<Q", _read(handle, 0, 8))
    if length > min(size - 8, _LARGEST_HEADER):
        raise BadSegmentError(f"it is torn or foreign: a header of {length} bytes in a file of {size}")
    header = json.loads(_read(handle, 8, length), object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
        raise BadSegmentError("it was not written by EDL")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _ids_in(arrays: Mapping[str, Array]) -> list[SampleId]:
    if ID_PREFIX in arrays:
        if arrays[ID_PREFIX].dtype != np.int64:
            raise BadSegmentError(f"its ids are {arrays[ID_PREFIX].dtype}")
        numbers: list[SampleId] = arrays[ID_PREFIX].tolist()
        return numbers
    text, ends = arrays[f"{ID_PREFIX}.utf8"].tobytes(), arrays[f"{ID_PREFIX}.ends"].tolist()
    if not ends or ends[-1] != len(text) or any(a > b for a, b in zip([0, *ends], ends, strict=False)):
        raise BadSegmentError("the ends of its ids make no sense")
    return [text[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]


def _stops_in(arrays: Mapping[str, Array], ids: int) -> Array:
    """Return behind which row each sequence ends.

    Raises:
        BadSegmentError: lengths or fingerprints are not those of so many sequences.
    """
    lengths, prints = arrays[_LENGTHS], arrays[_PRINTS]
    if lengths.dtype != np.int64 or prints.dtype != np.uint64 or len(lengths) != ids or len(prints) != ids or not ids:
        raise BadSegmentError(f"it has {len(lengths)} lengths and {len(prints)} fingerprints for {ids} sequences")
    if lengths.min() < 1 or lengths.max() > 1 << 36:  # with more their sum might pass for a small number
        raise BadSegmentError(f"it has a sequence of {lengths.min()} tokens, and one of {lengths.max()}")
    stops: Array = np.cumsum(lengths, dtype=np.int64)
    return stops


def _names_in(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the inputs of its sequences make no sense")
    return tuple(names)


def _read(handle: FileHandle, offset: int, count: int) -> bytes:
    data = os.pread(handle.fd, count, offset)
    if len(data) != count:
        raise BadSegmentError(f"it is torn: bytes {offset} to {offset + count} are missing")
    return data
