"""A folder of checkpoints on whatever `fsspec` reaches: a local folder, memory, an object store."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edl.collective.checkpoint.storage_manifest import MANIFEST, Manifest, Name, Summed
from edl.errors import ProtocolError, SettingsError

__all__ = ["Folder", "SummingWriter"]

_CHUNK_NBYTES: Final = 8 << 20


class SummingWriter(io.RawIOBase):
    """Passes bytes on to a file, and counts and checks them on the way."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._crc = self._size = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    @property
    def summed(self) -> Summed:
        """Of all that was written so far."""
        return Summed(self._size, self._crc)


class Folder:
    """Checkpoints under one URL. Errors of the file system are `OSError`."""

    def __init__(self, url: str) -> None:
        """The folder `url`, which need not exist.

        Raises:
            SettingsError: nothing here can reach such a URL.
        """
        import fsspec.core  # type: ignore[import-untyped]

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as exc:
            raise SettingsError(f"storage {url!r}: {exc}") from exc
        protocol = self._fs.protocol
        self.url = url
        self._local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def names(self) -> list[Name]:
        """All checkpoints, complete or not, newest first."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        found = [Name.parse(posixpath.basename(str(path).rstrip("/"))) for path in paths]
        return sorted((name for name in found if name is not None), reverse=True)

    def working(self, step: int, generation: int) -> Name:
        """Where to write a checkpoint before it is complete."""
        return Name(step, generation, temporary=self._local)

    def begin(self, name: Name) -> None:
        """Make room for a checkpoint."""
        self._fs.makedirs(self._path(name), exist_ok=True)

    def write(self, name: Name, file: str, write: Callable[[SummingWriter], object]) -> Summed:
        """Write one file of a checkpoint by calling `write`, and have it on disk before returning.

        Raises:
            FileNotFoundError: `begin` was not called, or another node has published the checkpoint.
        """
        with self._fs.open(f"{self._path(name)}/{file}", "wb") as opened:
            writer = SummingWriter(opened)
            write(writer)
            opened.flush()
            if self._local:
                os.fsync(opened.fileno())
        return writer.summed

    def read(self, name: Name, file: str) -> bytes:
        """All of a file."""
        data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}")
        return data

    def read_range(self, name: Name, file: str, offset: int, length: int) -> bytes:
        """Some bytes of a file; fewer where it ends."""
        data: bytes = self._fs.cat_file(f"{self._path(name)}/{file}", start=offset, end=offset + length)
        return data

    def files(self, name: Name) -> set[str]:
        """The names of a checkpoint's files; empty where there is no such checkpoint."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return set()
        return {posixpath.basename(str(path)) for path in paths}

    def intact(self, name: Name, file: str, wanted: Summed) -> bool:
        """Whether a file has the size and the checksum that the manifest says."""
        crc = size = 0
        try:
            with self._fs.open(f"{self._path(name)}/{file}", "rb") as opened:
                while chunk := opened.read(_CHUNK_NBYTES):
                    crc = zlib.crc32(chunk, crc)
                    size += len(chunk)
        except FileNotFoundError:
            return False
        return Summed(size, crc) == wanted

    def manifest(self, name: Name) -> Manifest | None:
        """A checkpoint's manifest, or None where it is not complete.

        Raises:
            ProtocolError: there is one, and it cannot be read.
        """
        try:
            data = self.read(name, MANIFEST)
        except FileNotFoundError:
            return None
        manifest = Manifest.parse(data)
        if (manifest.step, manifest.generation) != (name.step, name.generation):
            raise ProtocolError(f"the manifest in {name} is of another checkpoint")
        return manifest

    def publish(self, name: Name) -> bool:
        """Give a checkpoint whose manifest is written its name. Returns whether this call did it.

        Raises:
            OSError: it is neither here nor published.
        """
        if not name.temporary:
            return True
        final = Name(name.step, name.generation)
        old = f"{self._path(final)}.old"
        try:
            if self._fs.exists(self._path(final)) and self._fs.exists(self._path(name)):
                Path(self._path(final)).rename(old)  # an earlier job's of the same step and generation
            Path(self._path(name)).rename(self._path(final))
        except FileNotFoundError:
            if MANIFEST in self.files(final):
                return False  # another node was faster
            raise
        finally:
            if self._fs.exists(old):
                self._fs.rm(old, recursive=True)
        self._sync(self._root)
        return True

    def remove(self, name: Name) -> None:
        """Remove a checkpoint, its manifest first, so that half of it is never taken for the whole."""
        for path in (f"{self._path(name)}/{MANIFEST}", self._path(name)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)

    def _path(self, name: Name) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _sync(self, path: str) -> None:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
