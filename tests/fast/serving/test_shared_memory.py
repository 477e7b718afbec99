"""Shared memory regions: who may, what may be named, and bounds."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.protocol import kserve, names
from edl_serving.request_error import RequestError
from edl_serving.shared_memory import region as shm
from edl_serving.shared_memory.peers import PeerCredentials
from edl_serving.shared_memory.regions import ClientRegions, RegionTable
from tests.descriptors import count_descriptors

Make = Callable[[int], str]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes shared memory objects; their keys."""
    made: list[Path] = []

    def one(nbytes: int) -> str:
        path = Path("/dev/shm") / f"edl-test-{uuid.uuid4().hex}"
        path.write_bytes(bytes(range(256)) * (nbytes // 256 + 1))
        os.truncate(path, nbytes)
        made.append(path)
        return f"/{path.name}"

    yield one
    for path in made:
        path.unlink(missing_ok=True)


def asked(key: str, nbytes: int, name: str = "r", offset: int = 0) -> kserve.SystemSharedMemoryRegisterRequest:
    return kserve.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=nbytes)


def descriptors() -> int:
    gc.collect()
    return count_descriptors("/dev/shm/")


def for_client(max_regions: int, max_bytes: int) -> ClientRegions:
    """The regions of a server as a client of its own user sees them."""
    found = RegionTable(max_regions, max_bytes, PeerCredentials(lambda: ())).regions_of_client("unix:")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "key", ["", "/", "/..", "..", "/.", "/a/b", "a/b", "/../etc/passwd", "//etc", "/a\0b", "/" + "x" * 300, "/é" * 200]
)
def test_keys_must_be_plain_names(key: str) -> None:
    with pytest.raises(RequestError) as refused:
        for_client(4, 1000).register(asked(key, 1))
    assert refused.value.code.name == "INVALID_ARGUMENT"
    assert repr(key)[:20] in refused.value.message


def test_missing_objects_are_refused() -> None:
    with pytest.raises(RequestError, match="'/edl-no-such-object' cannot be opened"):
        for_client(4, 1000).register(asked("/edl-no-such-object", 1))


def test_a_link_and_a_folder_are_refused(make: Make) -> None:
    key = make(64)
    link = Path(f"/dev/shm{key}-link")
    folder = Path(f"/dev/shm{key}-folder")
    link.symlink_to("/etc/passwd")
    folder.mkdir()
    try:
        for path in (link, folder):
            with pytest.raises(RequestError, match=r"cannot be opened|no shared memory object"):
                for_client(4, 1000).register(asked(path.name, 1))
    finally:
        link.unlink()
        folder.rmdir()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (1, 64), (64, 1), (2**63, 2**63), (0, 0), (2**64 - 1, 2)])
def test_claims_beyond_objects_are_refused(make: Make, offset: int, nbytes: int) -> None:
    key = make(64)
    before = descriptors()
    with pytest.raises(RequestError) as refused:
        for_client(4, 2**65).register(asked(key, nbytes, offset=offset))
    assert str(nbytes) in refused.value.message
    del refused
    assert descriptors() == before


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
def test_regions_are_read_and_written(make: Make, offset: int) -> None:
    key = make(10_000)
    regions = for_client(4, 10_000)
    regions.register(asked(key, 100, offset=offset))
    view = regions["r"].view(3, 4)
    assert list(view) == [(offset + 3 + index) % 256 for index in range(4)]
    regions["r"].write_bytes(3, b"abcd")
    assert bytes(view) == b"abcd"  # the same memory
    assert Path(f"/dev/shm{key}").read_bytes()[offset + 3 : offset + 7] == b"abcd"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (-1, 4), (0, -1), (2**62, 2**62)])
def test_bytes_outside_are_refused(make: Make, offset: int, nbytes: int) -> None:
    regions = for_client(4, 10_000)
    regions.register(asked(make(200), 100))
    with pytest.raises(RequestError, match="'r' has 100 bytes"):
        regions["r"].view(offset, nbytes)


def test_shrunk_objects_are_refused(make: Make) -> None:
    key = make(8192)
    regions = for_client(4, 10_000)
    regions.register(asked(key, 8192))
    os.truncate(f"/dev/shm{key}", 4096)
    assert len(regions["r"].view(0, 4096)) == 4096
    with pytest.raises(RequestError, match="has shrunk to 4096 bytes"):
        regions["r"].view(4000, 200)


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
    assert len(regions) == 1
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


def test_an_empty_name_unregisters_all(make: Make) -> None:
    regions = for_client(4, 1000)
    for name in ("a", "b"):
        regions.register(asked(make(64), 64, name=name))
    regions.unregister("unknown")
    assert len(regions) == 2
    regions.unregister("")
    assert len(regions) == 0
    with pytest.raises(RequestError, match="'a' is not registered"):
        regions.status("a")


def test_an_empty_name_is_refused(make: Make) -> None:
    with pytest.raises(RequestError, match="name ''"):
        for_client(4, 1000).register(asked(make(64), 64, name=""))


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
            RequestError, match=r"belongs to user 65534; this server takes that of 0 .*--shared-memory-user"
        ):
            for_client(4, 1000).register(asked(key, 64))
        allowed = RegionTable(4, 1000, PeerCredentials(lambda: ()), [65534]).regions_of_client("unix:")
        assert allowed is not None
        allowed.register(asked(key, 64))
        assert allowed["r"].mapped is None, "another user may shrink it"


def test_arenas_of_dead_students_are_swept(make: Make) -> None:
    """Whether or not the file is still there; one that is locked lives, also without a name."""
    paths = [Path(f"/dev/shm/{names.LOCKED_MEMORY}0-{uuid.uuid4().hex}") for _ in range(3)]
    regions = RegionTable(4, 10_000, PeerCredentials(lambda: ()))
    mine = regions.regions_of_client("unix:")
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


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EMFILE", "ENFILE", "EACCES", "ENOMEM", "EINTR"])
@pytest.mark.parametrize(("module", "name"), [(os, "open"), (mmap, "mmap")])
def test_a_failed_call_refuses_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, module: object, name: str, code: str
) -> None:
    """The student then sends its inputs; the server has lost nothing, and takes the next."""
    number = getattr(errno, code)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    key = make(4096)
    regions = for_client(4, 10_000)
    before = descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        with pytest.raises(RequestError, match=f"{re.escape(repr(key))} cannot be .*: {os.strerror(number)}"):
            regions.register(asked(key, 4096))
    assert descriptors() == before
    regions.register(asked(key, 4096))
    assert len(regions["r"].view(0, 4096)) == 4096


@pytest.mark.parametrize(("name", "words"), [("preadv", "read"), ("pwrite", "written")])
def test_a_failed_copy_refuses_once(make: Make, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    key = make(4096)
    Path(f"/dev/shm{key}").chmod(0o666)
    regions = for_client(4, 10_000)
    regions.register(asked(key, 4096))
    region = regions["r"]
    use = (lambda: region.view(0, 8)) if name == "preadv" else (lambda: region.write_bytes(0, bytes(8)))
    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        with pytest.raises(RequestError, match=f"'r' cannot be {words}: {os.strerror(errno.EIO)}"):
            use()
    use()
