"""KServe v2's system shared memory extension: registered regions, and the users and connections that own them.

The server opens a client's object with the server's own rights, so it must not do anything for a client that the client
has no right to do itself. It accepts an object only from the object's owner, and each user has a separate namespace of
regions. If a client names no region in a request, the request is for the user's regions that were registered by this
client's connection or by a closed connection. gRPC reports only a peer's address; the kernel knows which user a
loopback connection belongs to (`/proc/net/tcp`, proc(5)).

An object is mapped if it belongs to the server's own user and no other user may write to it, so inputs are read without
a copy. When a mapped file is truncated, reading beyond its end kills the process with SIGBUS. So objects that other
users can truncate are copied with `preadv` instead. The server's own user could truncate an object too, but that user
could also simply kill the server. Each request checks that the object is still large enough, so only a truncation
during the computation remains dangerous. `multiprocessing.shared_memory` is not used because its resource tracker would
delete the clients' objects.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from edl.protocol import kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc
from edl.quoting import quote
from edl_serving.request_error import RequestError, invalid_argument

_DIRECTORY = "/dev/shm"
_UNUSED_S = 60.0  # an unlinked object that is unused for this long counts as abandoned; its client may still use it


@dataclass
class SharedMemoryRegion:
    """A registered piece of a shared memory object.

    The region stays open (and mapped) until the last array that uses it is gone, even if the region is no longer
    registered.

    Attributes:
        key: Name of the object.
        mapped: The mapped bytes; None if the region is not mapped and its bytes must be copied.
        identity: Device number and inode number of the object.
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
        os.close(self.fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.check_range(offset, nbytes)
        return self._read_copy(offset, nbytes) if self.mapped is None else self.mapped[offset : offset + nbytes]

    def check_range(self, offset: int, nbytes: int) -> None:
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
        """Write to the region through its file, because writing to a mapping fails if the file is truncated."""
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
        """Whether the client has died (its lock is gone) or probably has died (object unlinked and long unused)."""
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
    """Open the object that a request names, and map it if that is safe."""
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
            raise invalid_argument(f"shared memory key {quote(key)} is not a shared memory object")
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
            f"shared memory key {quote(key)} belongs to user {owner}; this server accepts keys of users "
            f"{', '.join(map(str, sorted(users)))} (edl serve --shared-memory-user {owner})"
        )
    if client not in (owner, 0):
        raise invalid_argument(
            f"shared memory key {quote(key)} belongs to user {owner}, but the client is user {client}"
        )


def _mapped(fd: int, offset: int, nbytes: int) -> memoryview:
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    return memoryview(mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start))[offset - start :]


class RegionTable:
    """The registered regions, by user and name, of the server's own user and of `users`. Use it on the event loop."""

    def __init__(
        self, peers: PeerCredentials, users: Collection[int] = (), max_regions: int = 256, max_bytes: int = 16 << 30
    ) -> None:
        self._max_regions = max_regions
        self._max_bytes = max_bytes
        self.peers = peers
        self.users = frozenset({os.geteuid(), *users})
        self._by_user: dict[int, dict[str, SharedMemoryRegion]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    @property
    def nbytes(self) -> int:
        # Copies of the views, since metrics are read in other threads.
        return sum(region.nbytes for regions in list(self._by_user.values()) for region in list(regions.values()))

    def regions_of_client(self, peer: str) -> ClientRegions | None:
        """Return the regions of a client on this host; None for a client on another host."""
        return ClientRegions(self, peer) if is_local(peer) else None

    def regions_of_user(self, user: int) -> dict[str, SharedMemoryRegion]:
        """Return a user's regions by name. Changing the dictionary changes the table."""
        return self._by_user.setdefault(user, {})

    def remove_abandoned(self) -> None:
        for regions in self._by_user.values():
            for name in [name for name, region in regions.items() if region.abandoned]:
                del regions[name]

    def check_capacity(self, nbytes: int) -> None:
        if len(self) >= self._max_regions or self.nbytes + nbytes > self._max_bytes:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no room for {nbytes} bytes of shared memory: {len(self)} of {self._max_regions} regions and "
                f"{self.nbytes} of {self._max_bytes} bytes are registered; unregister some",
            )


class ClientRegions:
    """The regions that a client can see: those of its user."""

    def __init__(self, table: RegionTable, peer: str) -> None:
        self._table = table
        self._peer = peer
        self._user = -1
        self._regions_by_name: dict[str, SharedMemoryRegion] | None = None

    def __getitem__(self, name: str) -> SharedMemoryRegion:
        try:
            return self._own()[name]
        except KeyError:
            raise invalid_argument(f"shared memory region {quote(name)} is not registered") from None

    def register(self, request: kserve.SystemSharedMemoryRegisterRequest) -> None:
        """Open and register an object. A name may be reused for the same region, or after its object is unlinked."""
        if not request.name:
            raise invalid_argument("shared memory region name '': must not be empty")
        own = self._own()
        region = open_region(request, self._peer, self._user, self._table.users)
        self._table.remove_abandoned()
        known = own.get(request.name)
        if known is not None:
            if (known.identity, known.offset, known.nbytes) == (region.identity, region.offset, region.nbytes):
                known.peer = self._peer
                return
            if os.fstat(known.fd).st_nlink > 0:
                raise RequestError(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"shared memory region {quote(request.name)} is already registered, with key {quote(known.key)}",
                )
            del own[request.name]
        self._table.check_capacity(region.nbytes)
        own[request.name] = region

    def unregister(self, name: str) -> None:
        """Remove a region, or all of this client's regions if `name` is empty. As in Triton, ignore unknown names."""
        own = self._own()
        for gone in [name] if name else self._names():
            own.pop(gone, None)

    def status(self, name: str) -> kserve.SystemSharedMemoryStatusResponse:
        """Describe a region, or all regions of this client if `name` is empty."""
        answer = kserve.SystemSharedMemoryStatusResponse()
        for region in [self[name]] if name else [self[mine] for mine in self._names()]:
            entry = kserve.SystemSharedMemoryStatusResponse.RegionStatus(
                name=region.name, key=region.key, offset=region.offset, byte_size=region.nbytes
            )
            answer.regions[region.name].CopyFrom(entry)
        return answer

    def _names(self) -> list[str]:
        """Return the names registered by this connection or by a closed one, since clients may reconnect."""
        return [
            name
            for name, region in self._own().items()
            if region.peer == self._peer or not self._table.peers.is_connected(region.peer)
        ]

    def _own(self) -> dict[str, SharedMemoryRegion]:
        if self._regions_by_name is None:  # looked up lazily, since most clients never use shared memory
            user = self._table.peers.user_of(self._peer)
            if user is None:
                raise invalid_argument(
                    f"shared memory is for users of this host; the user of {quote(self._peer)} is unknown"
                )
            self._user = user
            self._regions_by_name = self._table.regions_of_user(user)
        return self._regions_by_name


Address: TypeAlias = "tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_NOBODY = -1  # marks an address used by two users, which is possible with servers on one port of several addresses
_FRESH_S = 1.0
"""How long a look-up stays valid. The kernel does not give a closed loopback port to another client for a second."""


@functools.lru_cache(maxsize=1024)
def is_local(peer: str) -> bool:
    address = _parsed(peer)
    return address is not None and address[0].is_loopback


class PeerCredentials:
    """Finds the users that local clients of a server's TCP port belong to. Use it on the event loop."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._port = port
        self._users: dict[Address, int] = {}
        self._read_at = -_FRESH_S

    def user_of(self, peer: str) -> int | None:
        """Return the user id of a local peer; None if the user is unknown."""
        address = _parsed(peer)
        if address is None:
            return None
        if time.monotonic() >= self._read_at + _FRESH_S or address not in self._users:
            self._read()
        user = self._users.get(address, _NOBODY)
        return None if user == _NOBODY else user

    def is_connected(self, peer: str) -> bool:
        return self.user_of(peer) is not None

    def _read(self) -> None:
        self._read_at = time.monotonic()
        self._users.clear()
        port = f":{self._port():04X}"
        for table in _TABLES:
            with contextlib.suppress(OSError):  # no IPv6, or a system without these tables: users stay unknown
                for line in table.read_text().splitlines()[1:]:
                    if port in line:
                        self._add_client(line.split(), port)

    def _add_client(self, fields: list[str], port: str) -> None:
        client, server, state, user = fields[1], fields[2], fields[3], int(fields[7])
        if state == _ESTABLISHED and server.endswith(port):
            address = _from_table(client)
            if self._users.setdefault(address, user) != user:
                self._users[address] = _NOBODY


@functools.lru_cache(maxsize=1024)
def _parsed(peer: str) -> Address | None:
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    try:
        return _plain(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return None


def _from_table(text: str) -> Address:
    """Parse an address and port from /proc/net/tcp: hexadecimal 32-bit words in the host's byte order."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8]) for at in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address if this is an IPv4-mapped IPv6 address, else the address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
