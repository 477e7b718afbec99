"""A folder of checkpoints on any storage that `fsspec` reaches: a local folder, memory, an object store.

`CheckpointFolder` turns the errors of all these libraries into `OSError`. What differs between storages is here too: on
a local file system, files are synced to disk, and a checkpoint gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from edl.collective.checkpoint.storage.manifest import MANIFEST, CheckpointName, FileDigest, Manifest, newest_first
from edl.errors import EDLError, ProtocolError, SettingsError

__all__ = ["CheckpointFolder", "ChecksumWriter"]

_CHUNK_NBYTES: Final = 8 << 20
"""Bytes per write: a storage that takes a megabyte a second shows progress every eight seconds, and an object store
needs parts of at least 5 MB."""


class ChecksumWriter(io.RawIOBase):
    """Passes bytes on to an open file, counting them and computing their checksum.

    `written` is called with the number of bytes every time the file has taken a chunk of a few megabytes.
    """

    def __init__(self, file: Any, written: Callable[[int], object] = lambda nbytes: None) -> None:
        super().__init__()
        self._file = file
        self._written = written
        self._crc = 0
        self._size = 0
        self.failure: OSError | None = None
        """The first error of the file system, which torch turns into another error."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`. Returns its number of bytes.

        Raises:
            OSError: The file system refused the data.
        """
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
        """Return the number of bytes written so far."""
        return self._size

    @property
    def digest(self) -> FileDigest:
        """The digest of everything written so far."""
        return FileDigest(self._size, self._crc)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise OSError for the errors of the libraries on which fsspec's file systems are built."""
    try:
        yield
    except (OSError, EDLError):
        raise
    except Exception as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc


class CheckpointFolder:
    """Checkpoints under one URL. All errors of the file system are raised as `OSError`.

    Attributes:
        url: URL of the folder, which need not exist yet.
        written_nbytes: Bytes that the storage has taken so far, by which others see that it makes progress.

    Raises:
        SettingsError: None of fsspec's file systems can reach the URL.
    """

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
        """Write a file, and remove it.

        Raises:
            OSError: Nothing can be written here.
        """
        path = f"{self._root.rstrip('/')}/.edl-{secrets.token_hex(4)}"
        with _translated():
            self._fs.makedirs(self._root, exist_ok=True)
            with self._fs.open(path, "wb") as opened:
                opened.write(b"EDL can write here\n")
            self._fs.rm(path)

    def list_checkpoints(self) -> list[CheckpointName]:
        """Return all checkpoints, complete or not, newest first; those that their run has abandoned come last."""
        found = [CheckpointName.parse(name) for name in self._listed(self._root)]
        return newest_first(name for name in found if name is not None)

    def working_name(self, step: int, run: str, generation: int) -> CheckpointName:
        """Return the name under which a checkpoint is written until it is complete."""
        return CheckpointName(step, run, generation, temporary=self._local)

    def make_checkpoint_folder(self, name: CheckpointName) -> None:
        """Create the folder of a checkpoint."""
        with _translated():
            self._fs.makedirs(self._path(name), exist_ok=True)

    def write_file(self, name: CheckpointName, file: str, write: Callable[[ChecksumWriter], object]) -> FileDigest:
        """Write a file of a checkpoint, and on a local file system sync it to disk. Returns its digest.

        Raises:
            FileNotFoundError: The checkpoint has no folder, or another node has published the checkpoint.
        """
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
        """Replace a small file atomically: a reader sees either what was there before or all of the new file.

        Several nodes may write the same file, and a node may be killed while another publishes the checkpoint. Returns
        the digest of the file.

        Raises:
            FileNotFoundError: The checkpoint has no folder, or another node has published the checkpoint.
        """
        if not self._local:
            return self.write_file(name, file, lambda stream: stream.write(data))
        draft = f".{file}.{secrets.token_hex(4)}"
        try:
            summed = self.write_file(name, draft, lambda stream: stream.write(data))
            Path(self._path(name), draft).replace(Path(self._path(name), file))
        except OSError:
            for where in (name, name.final):  # another node may have published it in the meantime
                with contextlib.suppress(OSError):
                    Path(self._path(where), draft).unlink()
            raise
        return summed

    def read_file(self, name: CheckpointName, file: str) -> bytes:
        """Return the contents of a file."""
        with _translated():
            data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}")
        return data

    def read_file_range(self, name: CheckpointName, file: str, offset: int, length: int) -> bytes:
        """Return `length` bytes of a file from `offset` on, or fewer if the file ends before."""
        with _translated():
            data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}", start=offset, end=offset + length)
        return data

    def list_files(self, name: CheckpointName) -> set[str]:
        """Return the names of a checkpoint's files; empty if the checkpoint does not exist."""
        return self._listed(self._path(name))

    def read_manifest(self, name: CheckpointName) -> Manifest | None:
        """Return a checkpoint's manifest, or None if the checkpoint is not complete.

        Raises:
            ProtocolError: There is a manifest, but it cannot be read or is of another checkpoint.
        """
        try:
            data = self.read_file(name, MANIFEST)
        except FileNotFoundError:
            return None
        manifest = Manifest.parse(data)
        if CheckpointName(manifest.step, manifest.run, manifest.generation) != name.final:
            raise ProtocolError(f"the manifest in {name} is of another checkpoint")
        return manifest

    def is_published(self, name: CheckpointName) -> bool:
        """Return whether the checkpoint is complete, under its final name."""
        return MANIFEST in self.list_files(name.final)

    def publish_checkpoint(self, name: CheckpointName) -> bool:
        """Rename a checkpoint whose manifest is written to its final name. Returns False if another node did.

        Complete checkpoints are never overwritten. If the final name already has a complete checkpoint, another node
        has published the same one, and this copy is removed. A folder there without a manifest is what remains of an
        interrupted removal, and is replaced.

        Raises:
            OSError: The checkpoint is neither here nor published.
        """
        if not name.temporary:
            return True
        here, final = Path(self._path(name)), Path(self._path(name.final))
        try:
            self._sync(here)
            here.rename(final)
        except OSError:
            if self.is_published(name):  # another node was faster
                self.remove_checkpoint(name)
                return False
            if not here.exists():
                raise
            self.remove_checkpoint(name.final)  # the remains of an interrupted removal, without a manifest
            here.rename(final)
        self._sync(final.parent)
        return True

    def remove_checkpoint(self, name: CheckpointName) -> None:
        """Remove a checkpoint. The manifest goes first, so that a half-removed checkpoint does not look complete."""
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

    def _sync(self, folder: Path) -> None:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
