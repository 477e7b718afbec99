"""A folder of checkpoints in any storage that `fsspec` supports (a local folder, an object store), and its manifests.

::

    step-1000.g-3.r-346d06b6a1b2c3d4/
        __0_0.distcp      a rank's tensors; rank 0's file also contains what all ranks share
        piece-0.json      where everything is in that file, and the rank's metadata
        .metadata         the same for torch.distributed.checkpoint
        manifest.json     sizes and checksums of all of these; its presence makes the checkpoint complete

The name contains the step, the generation of the world that saved the checkpoint, and the run. The run is needed
because each run counts generations from its own beginning. A run's number is made from random bits and the time at
which the run began. Under `edl run`, the job's agents agree on the number in their Store. Otherwise, the ranks agree on
the number when they agree on the next save. The environment cannot supply the number: torchrun changes nothing in the
environment after a change of the world.

Differences between kinds of storage are handled here: on a local file system, files are synced to disk, and replaced in
one step.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edl.collective.checkpoint.encoding import from_json, to_json
from edl.errors import EDLError, ProtocolError, SettingsError
from edl.quoting import did_you_mean, quote

_RANDOM_BITS = 31  # with 32 bits of seconds that makes 63, which fit the int64 on which ranks agree


def new_run_id() -> int:
    """Return a unique 63-bit run number, larger than the number of any run that began at least a second earlier."""
    return int(time.time()) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS) or 1


def run_name(run: int) -> str:
    """Return a run number as used in names: 16 hexadecimal digits, which sort in the same order as the numbers."""
    return f"{run:016x}"


MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
_FORMAT: Final = 1  # a checkpoint with another number is refused, because this version could not read it
_NAME: Final = re.compile(r"step-(\d+)\.g-(-?\d+)\.r-([0-9a-f]{16})")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Name of a checkpoint. Names sort from old to new: by step, then by when the run began."""

    step: int  # last finished step
    run: str  # name of the run, 16 hexadecimal digits
    generation: int  # generation of the world, counted within the run

    def __str__(self) -> str:
        return f"step-{self.step}.g-{self.generation}.r-{self.run}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Return the checkpoint name that a folder's name represents, or None if the folder is something else."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[3], int(match[2]))


def newest_first(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Sort checkpoints, newest first. Checkpoints that a later generation of their run abandoned come last."""
    ordered = sorted(names, reverse=True)

    def is_abandoned(name: CheckpointName) -> bool:
        return any(
            later.run == name.run and later.generation > name.generation and later.step <= name.step
            for later in ordered
        )

    return sorted(ordered, key=is_abandoned)


@dataclass(frozen=True)
class FileDigest:
    """Digest of a file."""

    size: int
    crc32: int

    @classmethod
    def of_bytes(cls, data: bytes) -> FileDigest:
        return cls(len(data), zlib.crc32(data))


@dataclass(frozen=True)
class RankManifest:
    """Manifest of one rank's part of a checkpoint."""

    rank: int  # the rank and the number of ranks
    world: int
    file: str  # name of the file with the rank's data
    summed: FileDigest  # digest of that file
    tensors: dict[str, tuple[int, int]]  # offset and length in bytes of each tensor in the file, by key
    values: dict[str, tuple[int, int]]  # offset and length of each plain value (rank 0 only), by key
    paths: dict[str, tuple[Any, ...]]  # path in the nested state of each tensor and value (rank 0 only), by key
    meta: Any  # metadata of the rank's state, as parsed JSON
    run: str  # name of the run

    @staticmethod
    def file_name(rank: int) -> str:
        return f"piece-{rank}.json"

    def pack(self) -> bytes:
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        form = _form(data)
        try:
            return cls(
                rank=int(form["rank"]),
                world=int(form["world"]),
                file=str(form["file"]),
                summed=FileDigest(**form["summed"]),
                tensors={key: (int(offset), int(length)) for key, (offset, length) in form["tensors"].items()},
                values={key: (int(offset), int(length)) for key, (offset, length) in form["values"].items()},
                paths={key: tuple(path) for key, path in form["paths"].items()},
                meta=form["meta"],
                run=str(form["run"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"a piece of a checkpoint cannot be read: {exc!r}") from exc


@dataclass(frozen=True)
class Manifest:
    """Manifest of a complete checkpoint: its state, and the digests of its files by name."""

    step: int
    generation: int
    world: int
    files: dict[str, FileDigest]
    run: str

    def pack(self) -> bytes:
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        form = _form(data)
        try:
            files = {str(name): FileDigest(**digest) for name, digest in form["files"].items()}
            step, generation, world = (int(form[key]) for key in ("step", "generation", "world"))
            return cls(step, generation, world, files, run=str(form["run"]))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"a manifest cannot be read: {exc!r}") from exc


def _form(data: bytes) -> dict[str, Any]:
    form = from_json(data)
    if not isinstance(form, dict) or form.get("format") != _FORMAT:
        raise ProtocolError(f"not in format {_FORMAT}: another version of EDL wrote it")
    return form


_CHUNK_NBYTES: Final = 8 << 20  # shows progress on slow storage, and is above the 5 MB of an object store's parts


class ChecksumWriter(io.RawIOBase):
    """Writes bytes to an open file, counts and checksums the bytes, and calls `written` with the size of each chunk."""

    def __init__(self, file: Any, written: Callable[[int], object] = lambda nbytes: None) -> None:
        super().__init__()
        self._file = file
        self._written = written
        self._crc = 0
        self._size = 0
        self.failure: OSError | None = None  # the first error of the file system; torch raises another in its place

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _CHUNK_NBYTES):  # torch writes a whole tensor at once, however large
            chunk = view[begin : begin + _CHUNK_NBYTES]
            try:
                with _translated():
                    self._file.write(chunk)
            except OSError as exc:
                self.failure = exc
                raise
            self._crc = zlib.crc32(chunk, self._crc)
            self._size += len(chunk)
            self._written(len(chunk))
        return len(view)

    def tell(self) -> int:
        return self._size

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self._size, self._crc)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise OSError for errors from the libraries on which fsspec's file systems are built."""
    try:
        yield
    except (OSError, EDLError):
        raise
    except Exception as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return a URL or path that names the same folder even after the script has changed its working directory."""
    url = os.fspath(url)
    # fsspec takes file:/folder and local:/folder too, without `://`, and expands ~ itself.
    return url if not url or "://" in url or url.startswith(("~", "file:", "local:")) else str(Path(url).absolute())


def find_scheme_problem(url: str) -> str:
    """Return why no storage can have this URL, or "". The package of its scheme need not be installed here."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ModuleNotFoundError:  # it is in the image only
        return ""
    scheme, colon, _ = url.partition("://")
    known = fsspec.available_protocols()
    if not colon or scheme.rpartition("::")[2] in known:
        return ""
    hint = did_you_mean(scheme, known) or "; a package that adds it must also be installed here"
    return f"no storage has the scheme {quote(scheme)}{hint}"


class CheckpointFolder:
    """Checkpoints under one URL. A storage's errors are `OSError`. `written_nbytes` shows if writing makes progress."""

    def __init__(self, url: str) -> None:
        import fsspec.core  # type: ignore[import-untyped]

        try:
            filesystem, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as exc:
            raise SettingsError(f"storage {url!r}: {exc}") from exc
        self._fs = filesystem
        self._root = root
        protocol = self._fs.protocol
        self.url = url
        self.written_nbytes = 0
        self._local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def check_writable(self) -> None:
        path = f"{self._root.rstrip('/')}/.edl-{secrets.token_hex(4)}"
        with _translated():
            self._fs.makedirs(self._root, exist_ok=True)
            with self._fs.open(path, "wb") as opened:
                opened.write(b"EDL can write here\n")
            self._fs.rm(path)

    def list_checkpoints(self) -> list[CheckpointName]:
        """Return all checkpoints, complete or not, newest first. Checkpoints that their run has abandoned come last."""
        found = [CheckpointName.parse(name) for name in self._listed(self._root)]
        return newest_first(name for name in found if name is not None)

    def make_checkpoint_folder(self, name: CheckpointName) -> None:
        with _translated():
            self._fs.makedirs(self._path(name), exist_ok=True)

    def write_file(self, name: CheckpointName, file: str, write: Callable[[ChecksumWriter], object]) -> FileDigest:
        """Write a file of a checkpoint, and on a local file system sync it to disk. Returns its digest."""
        with _translated():
            opened = self._fs.open(f"{self._path(name)}/{file}", "wb")
        try:
            writer = ChecksumWriter(opened, self._count)
            try:
                write(writer)
            except Exception as exc:
                if writer.failure is not None and writer.failure is not exc:
                    raise writer.failure from exc
                raise
            with _translated():
                opened.flush()
                if self._local:
                    os.fsync(opened.fileno())
        finally:
            with _translated():
                opened.close()
        return writer.digest

    def replace_file(self, name: CheckpointName, file: str, data: bytes) -> FileDigest:
        """Replace a small file, which several nodes may write, in one step. Returns its digest."""
        if not self._local:
            return self.write_file(name, file, lambda stream: stream.write(data))
        draft = f".{file}.{secrets.token_hex(4)}"
        try:
            summed = self.write_file(name, draft, lambda stream: stream.write(data))
            Path(self._path(name), draft).replace(Path(self._path(name), file))
        except OSError:
            with contextlib.suppress(OSError):
                Path(self._path(name), draft).unlink()
            raise
        return summed

    def read_file(self, name: CheckpointName, file: str) -> bytes:
        with _translated():
            data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}")
        return data

    def read_file_range(self, name: CheckpointName, file: str, offset: int, length: int) -> bytes:
        """Return `length` bytes of a file from `offset` on, or fewer if the file ends sooner."""
        with _translated():
            data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}", start=offset, end=offset + length)
        return data

    def list_files(self, name: CheckpointName) -> set[str]:
        """Return the names of a checkpoint's files; empty if the checkpoint does not exist."""
        return self._listed(self._path(name))

    def read_manifest(self, name: CheckpointName) -> Manifest | None:
        """Return a checkpoint's manifest, or None if the checkpoint is not complete."""
        try:
            data = self.read_file(name, MANIFEST)
        except FileNotFoundError:
            return None
        manifest = Manifest.parse(data)
        if CheckpointName(manifest.step, manifest.run, manifest.generation) != name:
            raise ProtocolError(f"the manifest in {name} belongs to another checkpoint")
        return manifest

    def is_published(self, name: CheckpointName) -> bool:
        return MANIFEST in self.list_files(name)

    def publish_checkpoint(self, name: CheckpointName, manifest: Manifest) -> None:
        """Complete a checkpoint by writing its manifest, which reaches the disk after all other files."""
        self._sync(name)
        self.replace_file(name, MANIFEST, manifest.pack())
        self._sync(name)

    def remove_checkpoint(self, name: CheckpointName) -> None:
        """Remove a checkpoint, its manifest first, so that a half-removed checkpoint does not look complete."""
        for path in (f"{self._path(name)}/{MANIFEST}", self._path(name)):
            with contextlib.suppress(FileNotFoundError), _translated():
                self._fs.rm(path, recursive=True)

    def _count(self, nbytes: int) -> None:
        self.written_nbytes += nbytes

    def _listed(self, path: str) -> set[str]:
        try:
            with _translated():
                self._fs.invalidate_cache()
                paths = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return set()
        return {posixpath.basename(str(name).rstrip("/")) for name in paths}

    def _path(self, name: CheckpointName) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _sync(self, name: CheckpointName) -> None:
        """Sync the names of a checkpoint's files, and of the checkpoint's folder, to a local disk."""
        folder = Path(self._path(name))
        for path in (folder, folder.parent) if self._local else ():
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
