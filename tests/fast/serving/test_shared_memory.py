"""Shared memory regions: who may, what may be named, and bounds."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from edl.protocol import kserve, names
from edl_serving import shared_memory as shm
from edl_serving.request_error import RequestError
from edl_serving.shared_memory import ClientRegions, PeerCredentials, RegionTable, is_local
from tests.descriptors import count_descriptors
from tests.waiting import wait_until

Make = Callable[[int], str]


@pytest.fixture
def make(stack: ExitStack) -> Make:
    """Makes shared memory objects; their keys."""

    def one(nbytes: int) -> str:
        path = Path("/dev/shm") / f"edl-test-{uuid.uuid4().hex}"
        path.write_bytes(bytes(range(256)) * (nbytes // 256 + 1))
        os.truncate(path, nbytes)
        stack.callback(path.unlink, missing_ok=True)
        return f"/{path.name}"

    return one


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Leave what other tests have loaded out of the collections of `descriptors`."""
    gc.freeze()
    yield
    gc.unfreeze()


def asked(key: str, nbytes: int, name: str = "r", offset: int = 0) -> kserve.SystemSharedMemoryRegisterRequest:
    return kserve.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=nbytes)


def descriptors() -> int:
    gc.collect()
    return count_descriptors("/dev/shm/")


class Peers(PeerCredentials):
    """Clients whose names end in their user's id, until they are gone."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.gone: set[str] = set()

    def user_of(self, peer: str) -> int | None:
        return None if peer in self.gone else int(peer.rpartition(":")[2])


OWN = f"ipv4:127.0.0.1:{os.geteuid()}"


def for_client(max_regions: int, max_bytes: int, users: Collection[int] = ()) -> ClientRegions:
    """The regions of a server as a client of its own user sees them."""
    found = RegionTable(Peers(), users, max_regions, max_bytes).regions_of_client(OWN)
    assert found is not None
    return found


KEYS = ["", "/..", "/.", "/a/b", "/../etc/passwd", "/a\0b", "/" + "x" * 300, "edl-no-such-object"]


def test_keys_must_name_an_object() -> None:
    """A link to a file and a folder are none."""
    name = f"edl-test-{uuid.uuid4().hex}"
    link, folder = Path(f"/dev/shm/{name}-link"), Path(f"/dev/shm/{name}-folder")
    link.symlink_to("/etc/passwd")
    folder.mkdir()
    try:
        for key in (*KEYS, link.name, folder.name):
            with pytest.raises(RequestError) as refused:
                for_client(4, 1000).register(asked(key, 1))
            assert refused.value.code.name == "INVALID_ARGUMENT", key
            assert repr(key)[:20] in refused.value.message
    finally:
        link.unlink()
        folder.rmdir()


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 64), (2**63, 2**63), (0, 0), (2**64 - 1, 2)])
def test_claims_beyond_objects_are_refused(make: Make, offset: int, nbytes: int) -> None:
    key = make(64)
    before = descriptors()
    with pytest.raises(RequestError) as refused:
        for_client(4, 2**65).register(asked(key, nbytes, offset=offset))
    assert str(nbytes) in refused.value.message
    del refused
    assert descriptors() == before


@pytest.mark.parametrize("offset", [0, 1, 5000])
def test_regions_are_read_and_written(make: Make, offset: int) -> None:
    key = make(10_000)
    regions = for_client(4, 10_000)
    regions.register(asked(key, 100, offset=offset))
    view = regions["r"].view(3, 4)
    assert list(view) == [(offset + 3 + index) % 256 for index in range(4)]
    regions["r"].write_bytes(3, b"abcd")
    assert bytes(view) == b"abcd"  # the same memory
    assert Path(f"/dev/shm{key}").read_bytes()[offset + 3 : offset + 7] == b"abcd"
    for at, nbytes in ((0, 101), (100, 1), (-1, 4), (0, -1), (2**62, 2**62)):
        with pytest.raises(RequestError, match="'r' has 100 bytes"):
            regions["r"].view(at, nbytes)
    os.truncate(f"/dev/shm{key}", offset + 50)
    assert len(regions["r"].view(0, 50)) == 50
    with pytest.raises(RequestError, match="has shrunk to"):
        regions["r"].view(0, 51)


def test_arrays_outlive_their_registration(make: Make) -> None:
    before = descriptors()
    regions = for_client(4, 10_000)
    regions.register(asked(make(256), 256))
    array = np.frombuffer(regions["r"].view(0, 256), np.uint8)
    regions.unregister("r")
    with pytest.raises(RequestError, match="'r' is not registered"):
        regions["r"]
    assert array.tolist() == list(range(256))
    del array
    assert descriptors() == before


def test_names_are_free_without_their_client(make: Make) -> None:
    first, second = make(64), make(64)
    regions = for_client(4, 1000)
    regions.register(asked(first, 64))
    regions.register(asked(first, 64))
    assert list(regions.status("").regions) == ["r"]
    with pytest.raises(RequestError) as refused:
        regions.register(asked(second, 64))
    assert refused.value.code.name == "ALREADY_EXISTS"
    Path(f"/dev/shm{first}").unlink()
    regions.register(asked(second, 64))
    assert regions.status("r").regions["r"].key == second


def test_regions_of_dead_clients_make_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = for_client(2, 1000)
    keys = [make(400), make(400), make(400)]
    regions.register(asked(keys[0], 400, name="a"))
    with pytest.raises(RequestError, match="400 of 1000 bytes"):
        regions.register(asked(make(800), 800, name="large"))
    regions.register(asked(keys[1], 400, name="b"))
    with pytest.raises(RequestError, match="2 of 2 regions") as refused:
        regions.register(asked(keys[2], 100, name="c"))
    assert refused.value.code.name == "RESOURCE_EXHAUSTED"
    Path(f"/dev/shm{keys[0]}").unlink()
    with pytest.raises(RequestError):  # unlinked, but its client may have done that on purpose
        regions.register(asked(keys[2], 100, name="c"))
    monkeypatch.setattr(shm, "_UNUSED_S", 0.0)
    regions.register(asked(keys[2], 100, name="c"))
    assert sorted(regions.status("").regions) == ["b", "c"]


def test_a_client_sees_its_own_and_its_users(make: Make) -> None:
    """By name those of its user, who could read the objects himself; without a name its own. No other user's."""
    peers, user = Peers(), os.geteuid()
    table = RegionTable(peers, [4321])
    first, second, other = (
        table.regions_of_client(f"ipv4:127.0.0.{number}:{uid}") for number, uid in ((1, user), (2, user), (3, 4321))
    )
    assert table.regions_of_client("ipv4:10.0.0.1:5") is None
    assert first is not None
    assert second is not None
    assert other is not None
    key = make(64)
    first.register(asked(key, 64, name="a"))
    second.register(asked(make(64), 64, name="b"))
    assert list(second.status("").regions) == ["b"]
    assert second["a"].key == key
    for look in (lambda: other["a"], lambda: other.status("a")):
        with pytest.raises(RequestError, match="'a' is not registered"):
            look()
    with pytest.raises(RequestError, match=f"belongs to user {user}, but the client is user 4321"):
        other.register(asked(key, 64, name="mine"))
    other.unregister("a")
    other.unregister("")
    second.unregister("")
    second.unregister("unknown")
    assert list(first.status("").regions) == ["a"]
    peers.gone.add(f"ipv4:127.0.0.1:{user}")
    second.unregister("")  # of a connection that is gone: a client may connect again
    assert len(table) == 0
    with pytest.raises(RequestError, match="name ''"):
        second.register(asked(key, 64, name=""))


def test_what_others_may_shrink_is_copied(make: Make) -> None:
    """A mapping of a file that is made shorter ends the process that reads there, by SIGBUS."""
    key = make(8192)
    Path(f"/dev/shm{key}").chmod(0o666)
    regions = for_client(4, 10_000)
    regions.register(asked(key, 8000, offset=100))
    assert regions["r"].mapped is None
    view = regions["r"].view(3, 4)
    os.truncate(f"/dev/shm{key}", 0)
    assert list(view) == [(100 + 3 + index) % 256 for index in range(4)]
    with pytest.raises(RequestError, match="has shrunk to 0 bytes"):
        regions["r"].view(0, 4)
    with pytest.raises(RequestError, match="has shrunk to 0 bytes"):  # between the look at its size and the copy
        regions["r"]._read_copy(0, 4)


if os.geteuid() == 0:  # who else cannot give a file to another user

    def test_objects_of_other_users_are_refused(make: Make) -> None:
        key = make(64)
        os.chown(f"/dev/shm{key}", 65534, -1)
        with pytest.raises(
            RequestError, match=r"belongs to user 65534; this server accepts keys of users 0 .*--shared-memory-user"
        ):
            for_client(4, 1000).register(asked(key, 64))
        allowed = for_client(4, 1000, [65534])
        allowed.register(asked(key, 64))
        assert allowed["r"].mapped is None, "another user may shrink it"


def test_arenas_of_dead_students_are_swept(make: Make) -> None:
    """Whether or not the file is still there; one that is locked lives, also without a name."""
    paths = [Path(f"/dev/shm/{names.LOCKED_MEMORY}0-{uuid.uuid4().hex}") for _ in range(3)]
    regions = RegionTable(Peers())
    mine = regions.regions_of_client(OWN)
    assert mine is not None
    living = None
    try:
        for path in paths:
            path.write_bytes(bytes(64))
        living = paths[0].open("rb")
        fcntl.flock(living, fcntl.LOCK_EX)
        for path in paths:
            mine.register(asked(path.name, 64, name=path.name))
        paths[0].unlink()
        paths[1].unlink()
        before = descriptors()
        regions.remove_abandoned()
        assert list(regions.regions_of_user(os.geteuid())) == [paths[0].name]
        assert descriptors() == before - 2, "file and mapping; the other was swept by the registration behind it"
    finally:
        if living is not None:
            living.close()
        for path in paths:
            path.unlink(missing_ok=True)
    regions.remove_abandoned()
    assert len(regions) == 0


@pytest.mark.parametrize("call", ["open", "mmap", "preadv", "pwrite"])
def test_a_failed_call_refuses_once(make: Make, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The student then sends its inputs; the server has lost nothing, and takes the next."""
    words = os.strerror(errno.ENOSPC)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, words)

    key, regions = make(4096), for_client(4, 10_000)
    uses: dict[str, Callable[[], object]] = {
        "preadv": lambda: regions["r"].view(0, 8),
        "pwrite": lambda: regions["r"].write_bytes(0, bytes(8)),
    }
    use = uses.get(call, lambda: regions.register(asked(key, 4096)))
    if call in uses:
        Path(f"/dev/shm{key}").chmod(0o666)  # so that it is copied
        regions.register(asked(key, 4096))
    before = descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(mmap if call == "mmap" else os, call, fail)
        with pytest.raises(RequestError, match=f"cannot be .*: {words}"):
            use()
    assert descriptors() == before
    use()
    assert len(regions["r"].view(0, 4096)) == 4096


# Who a client is, by the kernel's word.


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.8.9.1:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("ipv4:10.0.0.7:50000", False),
        ("ipv6:[::ffff:10.0.0.7]:50000", False),
        ("", False),
        ("ipv4:localhost:1", False),
    ],
)
def test_only_peers_on_this_host_are_local(peer: str, local: bool) -> None:
    assert is_local(peer) == local


@contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[int, str]]:
    """A server's port, and the name that gRPC would give the client there."""
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.create_server(("::1" if host == "::1" else "127.0.0.1", 0), family=family) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection((host, port))
        server, _ = listener.accept()
        with client, server:
            found, own_port = client.getsockname()[:2]
            yield port, f"ipv6:[{found}]:{own_port}" if ":" in host else f"ipv4:{found}:{own_port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_kernel_knows_the_user(host: str) -> None:
    with connection(host) as (port, peer):
        peers = PeerCredentials(lambda: port)
        assert peers.user_of(peer) == os.geteuid()
        assert peers.is_connected(peer)
        assert PeerCredentials(lambda: port + 1).user_of(peer) is None, "of another server"
    wait_until(lambda: not peers.is_connected(peer))
    assert peers.user_of(peer) is None
