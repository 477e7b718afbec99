"""The registered regions of shared memory, and which client may use them.

The server opens what a client names with its own rights, so it must not do for a client what the client could not do
itself: it takes an object from its owner only, and users have names of regions of their own. Within a user, a client
that names no region means its own: regions that its connection has registered, or a connection that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from edl.protocol import kserve
from edl.protocol.transport import grpc
from edl_serving.request_error import RequestError, invalid_argument, quote
from edl_serving.shared_memory.peers import PeerCredentials, is_local
from edl_serving.shared_memory.region import SharedMemoryRegion, open_region

__all__ = ["ClientRegions", "RegionTable"]


class RegionTable:
    """The registered regions, by user and name. Used on the event loop only.

    Args:
        max_regions: how many there may be.
        max_bytes: how large all of them may be together.
        peers: tells the user of a client.
        users: ids of users whose shared memory is taken, besides the server's own user.
    """

    def __init__(self, max_regions: int, max_bytes: int, peers: PeerCredentials, users: Collection[int] = ()) -> None:
        self._max_regions = max_regions
        self._max_bytes = max_bytes
        self._peers = peers
        self._users = frozenset({os.geteuid(), *users})
        self._by_user: dict[int, dict[str, SharedMemoryRegion]] = {}

    def __len__(self) -> int:
        """Return the number of regions."""
        return sum(map(len, self._by_user.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self._all())

    def regions_of_client(self, peer: str) -> ClientRegions | None:
        """Return the regions as a client on this host may see them; None for a client elsewhere."""
        return ClientRegions(self, self._peers, self._users, peer) if is_local(peer) else None

    def regions_of_user(self, user: int) -> dict[str, SharedMemoryRegion]:
        """Return a user's regions by name; changes to the dictionary are changes to the table."""
        return self._by_user.setdefault(user, {})

    def remove_abandoned(self) -> None:
        """Forget regions whose client has died."""
        for regions in self._by_user.values():
            for name in [name for name, region in regions.items() if region.abandoned]:
                del regions[name]

    def check_capacity(self, nbytes: int) -> None:
        """Refuse a further region if there is no room.

        Args:
            nbytes: of the region.

        Raises:
            RequestError: there is no room.
        """
        if len(self) >= self._max_regions or self.nbytes + nbytes > self._max_bytes:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no room for {nbytes} bytes of shared memory: {len(self)} of {self._max_regions} regions and "
                f"{self.nbytes} of {self._max_bytes} bytes are registered; unregister some",
            )

    def _all(self) -> Iterator[SharedMemoryRegion]:
        for regions in self._by_user.values():
            yield from regions.values()


class ClientRegions:
    """The regions as a client sees them: those of its user.

    Args:
        regions: of all users.
        peers: tells the user of the client.
        users: ids of users whose shared memory is taken.
        peer: the client's connection, as gRPC names it.
    """

    def __init__(self, regions: RegionTable, peers: PeerCredentials, users: Collection[int], peer: str) -> None:
        self._regions = regions
        self._peers = peers
        self._users = users
        self._peer = peer
        self._user = -1
        self._regions_by_name: dict[str, SharedMemoryRegion] | None = None

    def __len__(self) -> int:
        """Return the number of regions of the user."""
        return len(self._own())

    def __getitem__(self, name: str) -> SharedMemoryRegion:
        """Return the region of a name.

        Raises:
            RequestError: there is none of that name.
        """
        try:
            return self._own()[name]
        except KeyError:
            raise invalid_argument(f"shared memory region {quote(name)} is not registered") from None

    def register(self, request: kserve.SystemSharedMemoryRegisterRequest) -> None:
        """Open what the request names.

        The same region again is no error. A name whose object is gone is free again.

        Args:
            request: of the client.

        Raises:
            RequestError: the name is taken, there are too many regions, or see `open_region`.
        """
        if not request.name:
            raise invalid_argument("shared memory region name '': must not be empty")
        own = self._own()
        region = open_region(request, self._peer, self._user, self._users)
        self._regions.remove_abandoned()
        known = own.get(request.name)
        if known is not None:
            if (known.identity, known.offset, known.nbytes) == (region.identity, region.offset, region.nbytes):
                known.peer = self._peer
                return
            if os.fstat(known.fd).st_nlink > 0:
                raise RequestError(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"shared memory region {quote(request.name)} is registered already, with key {quote(known.key)}",
                )
            del own[request.name]
        self._regions.check_capacity(region.nbytes)
        own[request.name] = region

    def unregister(self, name: str) -> None:
        """Forget a region. An unknown name is no error, as with Triton.

        Args:
            name: empty for all regions of this client.
        """
        own = self._own()
        for gone in [name] if name else self._names():
            own.pop(gone, None)

    def status(self, name: str) -> kserve.SystemSharedMemoryStatusResponse:
        """Describe regions.

        Args:
            name: empty for all regions of this client.

        Returns:
            The response to the client.

        Raises:
            RequestError: there is none of that name.
        """
        answer = kserve.SystemSharedMemoryStatusResponse()
        for region in [self[name]] if name else [self[mine] for mine in self._names()]:
            entry = answer.regions[region.name]
            entry.name = region.name
            entry.key = region.key
            entry.offset = region.offset
            entry.byte_size = region.nbytes
        return answer

    def _names(self) -> list[str]:
        """Return names that this connection registered, or a connection that is gone: a client may connect again."""
        return [
            name
            for name, region in self._own().items()
            if region.peer == self._peer or not self._peers.is_connected(region.peer)
        ]

    def _own(self) -> dict[str, SharedMemoryRegion]:
        if self._regions_by_name is None:  # only now, since most clients never use shared memory
            user = self._peers.user_of(self._peer)
            if user is None:
                raise invalid_argument(
                    f"shared memory is for users of this host; which one {quote(self._peer)} is is unknown"
                )
            self._user = user
            self._regions_by_name = self._regions.regions_of_user(user)
        return self._regions_by_name
