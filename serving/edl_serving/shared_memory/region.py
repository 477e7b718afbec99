"""A registered piece of system shared memory: found, checked, read and written (KServe v2's extension).

A client creates a POSIX shared memory object, registers it, and then says in its requests where in it a tensor lies.
Who may do so is decided in `edl_serving.shared_memory.regions`.

An object of the server's user that no other user may write is mapped: inputs are read where they are, without a copy. A
mapping of a file that is made shorter ends the process that reads there, by SIGBUS, so objects that other users can
make shorter are copied with `preadv` instead. What is left is the server's own user, who could as well kill it: a
request checks that the object is still large enough, which leaves the time of a single computation. Outputs are written
with `pwrite`. `multiprocessing.shared_memory` is not used because its resource tracker would delete the clients'
objects.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from edl.protocol import kserve, names
from edl.protocol.codec import Buffer
from edl_serving.request_error import RequestError, invalid_argument, quote

__all__ = ["SharedMemoryRegion", "open_region"]

_DIRECTORY = "/dev/shm"
_UNUSED_S = 60.0  # after which an object without a name, which its client may use on, counts as left behind


@dataclass
class SharedMemoryRegion:
    """A registered piece of a shared memory object.

    It stays open, and mapped if it was, until the last array in it is gone, whether or not it is still registered.

    Attributes:
        name: of the region.
        key: of the object.
        offset: of the region in the object, in bytes.
        nbytes: of the region.
        fd: the open object.
        mapped: the bytes where they are, None if they are to be copied.
        identity: device and inode of the object.
        peer: the connection that registered it, as gRPC names it.
        used_at: when it was last used, in seconds of a monotonic clock.
    """

    name: str
    key: str
    offset: int
    nbytes: int
    fd: int
    mapped: memoryview | None
    identity: tuple[int, int]
    peer: str = ""
    used_at: float = field(default_factory=time.monotonic)

    def __del__(self) -> None:
        """Close the object."""
        os.close(self.fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the region, where they are or copied.

        Args:
            offset: in the region, in bytes.
            nbytes: how many.

        Raises:
            RequestError: the bytes lie outside the region, or the object has shrunk.
        """
        self.check_range(offset, nbytes)
        return self._read_copy(offset, nbytes) if self.mapped is None else self.mapped[offset : offset + nbytes]

    def check_range(self, offset: int, nbytes: int) -> None:
        """Refuse bytes outside the region or the object.

        Args:
            offset: in the region, in bytes.
            nbytes: how many.

        Raises:
            RequestError: the bytes lie outside.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise invalid_argument(
                f"shared memory region {quote(self.name)} has {self.nbytes} bytes; "
                f"{nbytes} bytes from offset {offset} lie outside"
            )
        size = os.fstat(self.fd).st_size
        if self.offset + offset + nbytes > size:
            raise self._shrunk_error(size)
        self.used_at = time.monotonic()

    def write_bytes(self, offset: int, data: Buffer) -> None:
        """Write to the region through the file, since a mapping could be cut off.

        Args:
            offset: in the region, in bytes; with the size of `data` it has passed `check_range`.
            data: to write.

        Raises:
            RequestError: the object cannot be written.
        """
        view = memoryview(data).cast("B")
        at = self.offset + offset
        while view:
            try:
                written = os.pwrite(self.fd, view, at)
            except OSError as exc:
                raise invalid_argument(
                    f"shared memory region {quote(self.name)} cannot be written: {exc.strerror}"
                ) from exc
            view = view[written:]
            at += written

    @property
    def abandoned(self) -> bool:
        """Whether the client has died, or probably has: the object's name is gone and it was not used for a while."""
        if self.key.lstrip("/").startswith(names.LOCKED_MEMORY) and not self._is_locked:
            return True
        return os.fstat(self.fd).st_nlink == 0 and time.monotonic() - self.used_at > _UNUSED_S

    @property
    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def _read_copy(self, offset: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self.fd, [data[done:]], self.offset + offset + done)
            except OSError as exc:
                raise invalid_argument(
                    f"shared memory region {quote(self.name)} cannot be read: {exc.strerror}"
                ) from exc
            if not count:
                raise self._shrunk_error(os.fstat(self.fd).st_size)
            done += count
        return data.toreadonly()

    def _shrunk_error(self, size: int) -> RequestError:
        return invalid_argument(
            f"shared memory region {quote(self.name)}: {quote(self.key)} has shrunk to {size} bytes"
        )


def open_region(
    request: kserve.SystemSharedMemoryRegisterRequest, peer: str, client: int, users: Collection[int]
) -> SharedMemoryRegion:
    """Open the object that a request names, and map it if that is safe.

    Args:
        request: names region, object, offset and size.
        peer: the connection that registers it.
        client: id of the user who asks: the owner of the object, or root.
        users: ids of the users whose objects are taken at all.

    Returns:
        The region.

    Raises:
        RequestError: the key is no plain name, there is no such object, it is another user's, or smaller than claimed.
    """
    key, offset, nbytes = request.key, request.offset, request.byte_size
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
        raise invalid_argument(
            f"shared memory key {quote(key)}: must be the name of a shared memory object, such as '/name'"
        )
    if nbytes == 0:
        raise invalid_argument(f"shared memory region {quote(request.name)}: byte_size 0: must be above 0")
    try:
        fd = os.open(f"{_DIRECTORY}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise invalid_argument(f"shared memory key {quote(key)} cannot be opened: {exc.strerror}") from exc
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise invalid_argument(f"shared memory key {quote(key)} is no shared memory object")
        _check_owner(key, found, client, users)
        if offset + nbytes > found.st_size:
            raise invalid_argument(
                f"shared memory key {quote(key)} has {found.st_size} bytes; "
                f"{nbytes} bytes from offset {offset} were claimed"
            )
        ours_alone = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        try:
            mapped = _mapped(fd, offset, nbytes) if ours_alone else None
        except OSError as exc:
            raise invalid_argument(f"shared memory key {quote(key)} cannot be mapped: {exc.strerror}") from exc
        stack.pop_all()
    return SharedMemoryRegion(request.name, key, offset, nbytes, fd, mapped, (found.st_dev, found.st_ino), peer)


def _check_owner(key: str, found: os.stat_result, client: int, users: Collection[int]) -> None:
    owner = found.st_uid
    if owner not in users:
        raise invalid_argument(
            f"shared memory key {quote(key)} belongs to user {owner}; this server takes that of "
            f"{', '.join(map(str, sorted(users)))} (edl serve --shared-memory-user {owner})"
        )
    if client not in (owner, 0):
        raise invalid_argument(
            f"shared memory key {quote(key)} belongs to user {owner}, and the client is user {client}"
        )


def _mapped(fd: int, offset: int, nbytes: int) -> memoryview:
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    return memoryview(mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start))[offset - start :]
