"""System shared memory: tensors that clients on this host pass by name instead of by value (KServe v2's extension).

A client creates a POSIX shared memory object, registers it, and then says in each request where in it a tensor lies.
Inputs are read where they are, without a copy; outputs are written with `pwrite`.

Who may do so must be trusted: the server opens what the client names with its own rights, and a client that shrinks
its object while the model reads it ends the server, because the kernel sends SIGBUS. (That the object is still large
enough is checked for each request, which leaves the time of one computation.) Hence only peers on this host, and a
setting to turn it off.
`multiprocessing.shared_memory` is not used because its resource tracker would delete the clients' objects.
"""

from __future__ import annotations

import functools
import ipaddress
import mmap
import os
import stat
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from edl.protocol import kserve
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc
from edl_serving.refusal import Refusal, invalid, quote

__all__ = ["Region", "Regions", "is_local"]

_DIRECTORY = "/dev/shm"
_UNUSED_S = 60.0


@functools.lru_cache(maxsize=1024)
def is_local(peer: str) -> bool:
    """Whether gRPC's name of a peer ("ipv4:1.2.3.4:5", "ipv6:[::1]:5", "unix:...") is one on this host."""
    kind, _, rest = unquote(peer).partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass
class Region:
    """A registered piece of a shared memory object.

    It stays mapped until the last array in it is gone, whether or not it is still registered.
    """

    name: str
    key: str
    offset: int
    nbytes: int
    fd: int
    mapped: memoryview
    identity: tuple[int, int]
    used_at: float = field(default_factory=time.monotonic)

    def __del__(self) -> None:
        os.close(self.fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """These bytes, where they are.

        Raises:
            Refusal: they lie outside the region, or the object has shrunk.
        """
        self.check(offset, nbytes)
        return self.mapped[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Refuse bytes outside the region or the object."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise invalid(
                f"shared memory region {quote(self.name)} has {self.nbytes} bytes; "
                f"{nbytes} bytes from offset {offset} lie outside"
            )
        size = os.fstat(self.fd).st_size
        if self.offset + offset + nbytes > size:
            raise invalid(f"shared memory region {quote(self.name)}: {quote(self.key)} has shrunk to {size} bytes")
        self.used_at = time.monotonic()

    def write(self, offset: int, data: Buffer) -> None:
        """Put `data` at `offset`, which `check` has passed. Through the file, since a mapping could be cut off."""
        view = memoryview(data).cast("B")
        at = self.offset + offset
        while view:
            try:
                written = os.pwrite(self.fd, view, at)
            except OSError as exc:
                raise invalid(f"shared memory region {quote(self.name)} cannot be written: {exc.strerror}") from exc
            view = view[written:]
            at += written

    @property
    def abandoned(self) -> bool:
        """The object's name is gone and nobody has used it for a while: its client probably died."""
        return os.fstat(self.fd).st_nlink == 0 and time.monotonic() - self.used_at > _UNUSED_S


class Regions:
    """The registered regions, by name. Used on the event loop only.

    Args:
        max_regions: how many there may be.
        max_bytes: how large all of them may be together.
    """

    def __init__(self, max_regions: int, max_bytes: int) -> None:
        self._max_regions = max_regions
        self._max_bytes = max_bytes
        self._regions: dict[str, Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, name: str) -> Region:
        """Raises Refusal if there is none of that name."""
        try:
            return self._regions[name]
        except KeyError:
            raise invalid(f"shared memory region {quote(name)} is not registered") from None

    def register(self, request: kserve.SystemSharedMemoryRegisterRequest) -> None:
        """Map what the request names. The same region again is no error; a name whose object is gone is free again.

        Raises:
            Refusal: the name is taken, the key is no plain name, there is no such object, it is smaller than claimed,
                or there are too many.
        """
        if not request.name:
            raise invalid("shared memory region name '': must not be empty")
        region = _map(request)
        known = self._regions.get(request.name)
        if known is not None:
            if (known.identity, known.offset, known.nbytes) == (region.identity, region.offset, region.nbytes):
                return
            if os.fstat(known.fd).st_nlink > 0:
                raise Refusal(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"shared memory region {quote(request.name)} is registered already, with key {quote(known.key)}",
                )
            del self._regions[request.name]
        self._make_room(region.nbytes)
        self._regions[request.name] = region

    def _make_room(self, nbytes: int) -> None:
        if not self._full(nbytes):
            return
        for name in [name for name, region in self._regions.items() if region.abandoned]:
            del self._regions[name]
        if self._full(nbytes):
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no room for {nbytes} bytes of shared memory: {len(self._regions)} of {self._max_regions} regions and "
                f"{self._bytes()} of {self._max_bytes} bytes are registered; unregister some",
            )

    def _full(self, nbytes: int) -> bool:
        return len(self._regions) >= self._max_regions or self._bytes() + nbytes > self._max_bytes

    def _bytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    def unregister(self, name: str) -> None:
        """Forget a region, or all for an empty name. An unknown one is no error, as with Triton."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str) -> kserve.SystemSharedMemoryStatusResponse:
        """The region `name`, or all for an empty name.

        Raises:
            Refusal: there is none of that name.
        """
        answer = kserve.SystemSharedMemoryStatusResponse()
        for region in [self[name]] if name else self._regions.values():
            entry = answer.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.nbytes
        return answer


def _map(request: kserve.SystemSharedMemoryRegisterRequest) -> Region:
    key, offset, nbytes = request.key, request.offset, request.byte_size
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
        raise invalid(f"shared memory key {quote(key)}: must be the name of a shared memory object, such as '/name'")
    if nbytes == 0:
        raise invalid(f"shared memory region {quote(request.name)}: byte_size 0: must be above 0")
    try:
        fd = os.open(f"{_DIRECTORY}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise invalid(f"shared memory key {quote(key)} cannot be opened: {exc.strerror}") from exc
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise invalid(f"shared memory key {quote(key)} is no shared memory object")
        if offset + nbytes > found.st_size:
            raise invalid(
                f"shared memory key {quote(key)} has {found.st_size} bytes; "
                f"{nbytes} bytes from offset {offset} were claimed"
            )
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapped = memoryview(mmap.mmap(fd, offset + nbytes - start, prot=mmap.PROT_READ, offset=start))[offset - start :]
    except (OSError, Refusal) as exc:
        os.close(fd)
        if isinstance(exc, OSError):
            raise invalid(f"shared memory key {quote(key)} cannot be mapped: {exc.strerror}") from exc
        raise
    return Region(request.name, key, offset, nbytes, fd, mapped, (found.st_dev, found.st_ino))
