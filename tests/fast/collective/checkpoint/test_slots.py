"""Two slots in shared memory, of which a torn one is never found; and copies to them, from a fake GPU as well."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.checkpoint.memory import slots as slots_module
from edl.collective.checkpoint.memory.copying import TensorCopier
from edl.collective.checkpoint.memory.slots import (
    HEADER_NBYTES,
    SlotHeader,
    SlotPair,
    find_slots,
    preallocate_slots,
    slot_nbytes,
)
from edl.errors import ClosedError, SettingsError


def write(slots: SlotPair, step: int, nbytes: int = 100, generation: int = 0) -> None:
    meta = b"m%d" % step
    _, memory = slots.begin_write(nbytes, len(meta))
    memory[HEADER_NBYTES : HEADER_NBYTES + nbytes] = struct.pack("<q", step)[:1] * nbytes
    slots.commit_write(SlotHeader(generation, step, 1, 0), nbytes, meta)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def test_last_two_states_newest_first(prefix: Path) -> None:
    slots = SlotPair(prefix)
    assert find_slots(prefix) == []
    memories = set()
    for step in range(5):
        write(slots, step)
        memories.add(find_slots(prefix)[0].path.stat().st_ino)
    assert [one.header.step for one in find_slots(prefix)] == [4, 3]
    copy = find_slots(prefix)[0].copy_contents()
    assert (copy.meta, copy.data) == (b"m4", b"\x04" * 100)
    assert len(memories) == 2, "their memory is used again"
    write(slots, 2, generation=1)
    assert [one.header.step for one in find_slots(prefix)] == [2, 4], "the world's generation counts before the step"
    os.truncate(find_slots(prefix)[0].path, HEADER_NBYTES + 50)
    assert [one.header.step for one in find_slots(prefix)] == [4]


@settings(max_examples=40)
@given(saves=st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=8))
def test_cut_save_keeps_the_one_before(tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, bool]]) -> None:
    """Any sequence of saves of any size, each finished or given up half way, perhaps by a worker that starts anew."""
    prefix = tmp_path_factory.mktemp("slots") / "s"
    newest, slots = None, SlotPair(prefix)
    for step, (nbytes, finished) in enumerate(saves):
        if finished:
            write(slots, step, nbytes)
            newest = (step, nbytes)
        else:
            _, memory = slots.begin_write(nbytes, 2)
            memory[HEADER_NBYTES : HEADER_NBYTES + nbytes // 2] = b"\xff" * (nbytes // 2)
            slots = SlotPair(prefix)
        found = find_slots(prefix)
        assert [one.header.step for one in found[:1]] == ([] if newest is None else [newest[0]])
        if newest is not None:
            copy = found[0].copy_contents()
            assert copy.data == struct.pack("<q", newest[0])[:1] * newest[1]


@settings(max_examples=100)
@given(at=st.integers(0, HEADER_NBYTES + 199), bit=st.integers(0, 7))
def test_damaged_header_is_not_used(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    prefix = tmp_path_factory.getbasetemp() / "damaged"
    slots = SlotPair(prefix)
    write(slots, 1)
    newest = find_slots(prefix)[0]
    path = newest.path
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)
    for found in find_slots(prefix):
        copy = found.copy_contents()
        if found.path == path and copy is not None:
            assert (copy.header, copy.meta) == (newest.header, b"m1")


def test_private_slots_are_removed(prefix: Path) -> None:
    slots = SlotPair.from_env()
    write(slots, 1)
    paths = [one.path for one in slots.find_complete()]
    assert [path.parent for path in paths] == [Path("/dev/shm")]
    slots.close()
    assert not any(path.exists() for path in paths)
    with pytest.raises(ClosedError):
        slots.begin_write(1, 1)


def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_SHM_FOLDER", tmp_path)  # tests in other processes sweep as well
    child = os.fork()
    if child == 0:
        slots = SlotPair.from_env()
        write(slots, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(tmp_path.glob(f"edl-slots-{child}-*"))
    SlotPair.from_env().close()
    assert not list(tmp_path.glob(f"edl-slots-{child}-*"))


def test_too_little_shared_memory(prefix: Path) -> None:
    slots = SlotPair(prefix)
    write(slots, 1)
    with pytest.raises(SettingsError, match="enlarge"):
        slots.begin_write(1 << 60, 10)
    assert [one.header.step for one in find_slots(prefix)] == [1]


def test_room_made_before_holds_nothing(prefix: Path) -> None:
    assert slot_nbytes(prefix) == 0
    preallocate_slots(prefix, 5_000_000)
    assert slot_nbytes(prefix) == 5_000_000
    assert find_slots(prefix) == []
    pair = SlotPair(prefix)
    _, memory = pair.begin_write(3_000_000, 10)
    assert len(memory) == 5_000_000
    pair.commit_write(SlotHeader(0, 1, 1, 0), 3_000_000, b"x" * 10)
    assert find_slots(prefix)[0].header.step == 1
    pair.close()


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[TensorCopier]:
    made = TensorCopier(request.param)
    yield made
    made.close()


def test_everything_is_copied_bit_for_bit(copier: TensorCopier) -> None:
    base = torch.randn(3000, 2000)
    sources = [
        base, base.t(), base[::2, 5], torch.tensor(3.5, dtype=torch.bfloat16), torch.empty(0, 4),
        torch.randn(7, dtype=torch.complex64).conj(), torch.arange(5_000_001, dtype=torch.uint8), base[0, 0].expand(4),
        torch.nn.Parameter(torch.ones(7)),
    ]  # fmt: skip
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for _ in range(2):
        copier.copy_tensors(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
            assert not target.requires_grad
        base += 1
