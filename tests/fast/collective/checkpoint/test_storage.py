"""Checkpoints on storage: written from slots without a world, whole or not at all; and the thread that stores them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from edl.collective.agent.context import JobRun
from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory.copying import slot_bytes
from edl.collective.checkpoint.memory.slots import CompleteSlot, PinnedSlot, SlotHeader, SlotPair, find_marked_slots
from edl.collective.checkpoint.state.state import State
from edl.collective.checkpoint.state.tensors import view_of
from edl.collective.checkpoint.storage import writer as persister_module
from edl.collective.checkpoint.storage.folder import CheckpointName, newest_first
from edl.collective.checkpoint.storage.reader import newest_stored, restore_from_storage
from edl.collective.checkpoint.storage.writer import CheckpointPersister, CheckpointWriter
from edl.discovery import open_store
from edl.errors import ProtocolError, SettingsError, TemporaryError
from tests.waiting import DEADLINE_S, wait_until

FIRST, SECOND = "346d06b600000001", "346d06b600000002"
"""Two runs, the second of which began later."""


def put(prefix: Path, state: State, step: int, rank: int = 0, world: int = 1, generation: int = 1) -> None:
    """Save a state that is wanted on storage."""
    save_state(SlotPair(prefix), state, SlotHeader(generation, step, world, rank, persist=True))


def save_state(slots: SlotPair, state: State, header: SlotHeader) -> None:
    """Save a state in slots that stay open."""
    captured = state.capture()
    _, memory = slots.begin_write(captured.data_nbytes, len(captured.meta))
    data = slot_bytes(memory, captured.data_nbytes)
    for entry, tensor in zip(captured.entries, captured.tensors, strict=True):
        view_of(data, entry).copy_(tensor)
    slots.commit_write(header, captured.data_nbytes, captured.meta)


def storing(url: Path | str, run: str = FIRST, **settings: Any) -> CheckpointWriter:
    return CheckpointWriter(str(url), run=lambda: run, **settings)


def write(url: Path | str, *prefixes: Path, run: str = FIRST, **settings: Any) -> bool | None:
    """Store the newest state; return whether the checkpoint is complete, None if nothing was stored."""
    outcome = storing(url, run, **settings).write_newest(prefixes)
    return None if outcome is None else outcome[1]


def stored(url: Path | str) -> tuple[int, int] | None:
    """Restore what is stored, and return its step and its epoch."""
    restored = restore_from_storage(target := job(9), str(url))
    return None if restored is None else (restored.step, target.epoch)


def job(seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return State(
        model=model,
        optimizer=optimizer,
        epoch=seed,
        notes=[(1, "a"), None],
        table=np.arange(seed),
        empty=torch.empty(0),
    )


def bits(state: State) -> list[bytes]:
    return [one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in state.capture().tensors]


@pytest.fixture
def url() -> Iterator[str]:
    name = f"memory://edl-{uuid.uuid4().hex}"
    yield name
    fs, root = fsspec.core.url_to_fs(name)
    if fs.exists(root):
        fs.rm(root, recursive=True)


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> str:
    return url if request.param == "memory" else str(tmp_path / "checkpoints")


def names(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))


def test_stored_state_comes_back(tmp_path: Path, place: str) -> None:
    source = job(3)
    put(tmp_path / "s", source, 7)
    assert restore_from_storage(State(rng=False), place) is None
    outcome = storing(place).write_newest([tmp_path / "s"])
    assert outcome == (7, True)
    wanted = bits(source)
    target = job(4)
    restored = restore_from_storage(target, place)
    assert (restored.step, restored.world) == (7, 1)
    assert (target.epoch, target.notes, target.table.tolist()) == (3, [(1, "a"), None], [0, 1, 2])
    assert bits(target) == wanted


def test_several_nodes_make_one_checkpoint(tmp_path: Path, url: str) -> None:
    """The replicated part is stored once, each rank's own part by its node, and the last one completes it."""
    for rank in range(3):
        put(tmp_path / f"s{rank}", job(2), 5, rank=rank, world=3)
    assert write(url, tmp_path / "s0", tmp_path / "s1") is False
    assert stored(url) is None
    assert write(url, tmp_path / "s2") is True
    assert stored(url) == (5, 2)
    fs, root = fsspec.core.url_to_fs(url)
    pieces = [json.loads(fs.cat_file(f"{root}/step-5.g-1.r-{FIRST}/piece-{rank}.json")) for rank in range(3)]
    assert ["model.weight" in piece["tensors"] for piece in pieces] == [True, False, False]
    assert all("rng.torch" in piece["tensors"] for piece in pieces)


@pytest.mark.parametrize("harm", ["truncate", "flip", "missing", "manifest", "no manifest"])
def test_damaged_checkpoint_falls_back(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        put(tmp_path / "s", job(step), step)
        write(tmp_path / "c", tmp_path / "s")
    folder = tmp_path / f"c/step-2.g-1.r-{FIRST}"
    data, manifest = folder / "__0_0.distcp", folder / "manifest.json"
    content = bytearray(data.read_bytes())
    if harm == "truncate":
        data.write_bytes(content[:-1])
    elif harm == "flip":
        content[content.index(job(2).model.weight.detach().view(torch.uint8).numpy().tobytes())] ^= 1
        data.write_bytes(content)
    elif harm == "missing":
        data.unlink()
    elif harm == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        manifest.unlink()
    assert stored(tmp_path / "c") == (1, 1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if harm == "no manifest" else 1)
    assert all(folder.name in line for line in lines)


def test_abandoned_world_completes_nothing(tmp_path: Path, url: str) -> None:
    put(tmp_path / "s", job(1), 1)
    assert write(url, tmp_path / "s", fence=lambda: False) is None
    assert stored(url) is None
    assert write(url, tmp_path / "s") is True


def test_unfinished_remains_are_removed(tmp_path: Path) -> None:
    """Also those of another run that began earlier: the last nodes of a job may store when the next has begun."""
    for number, run in ((1, FIRST), (2, SECOND)):
        put(tmp_path / f"half{number}", job(1), number, world=2)
        write(tmp_path / "c", tmp_path / f"half{number}", run=run)
    assert names(str(tmp_path / "c")) == [f"step-1.g-1.r-{FIRST}", f"step-2.g-1.r-{SECOND}"]
    put(tmp_path / "s", job(2), 3)
    write(tmp_path / "c", tmp_path / "s")
    assert names(str(tmp_path / "c")) == [f"step-2.g-1.r-{SECOND}", f"step-3.g-1.r-{FIRST}"]


def test_half_removed_one_is_written_again(tmp_path: Path) -> None:
    put(tmp_path / "s", job(1), 1)
    write(tmp_path / "c", tmp_path / "s")
    for name in ("manifest.json", "__0_0.distcp"):
        (tmp_path / f"c/step-1.g-1.r-{FIRST}/{name}").unlink()
    assert write(tmp_path / "c", tmp_path / "s") is True
    assert stored(tmp_path / "c") == (1, 1)


def test_foreign_piece_does_not_complete(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path / f"s{rank}", job(rank), 5, rank=rank, world=2)
    write(tmp_path / "c", tmp_path / "s0")
    (tmp_path / f"c/step-5.g-1.r-{FIRST}").rename(tmp_path / f"c/step-5.g-1.r-{SECOND}")
    assert write(tmp_path / "c", tmp_path / "s1", run=SECOND) is False


_KILLED, _NEVER = 77, 78
_CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def _call_at(instant: int, under: str, function: Callable[[], object], *, reads: bool = False) -> itertools.count[int]:
    """Call a function before such call number `instant` that changes a file below a path, or reads one; count them."""
    calls = itertools.count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opens = (
            event == "open" and isinstance(arguments[2], int) and (reads or arguments[2] & (os.O_WRONLY | os.O_RDWR))
        )
        inside = bool(arguments) and str(arguments[0]).startswith(under)
        if inside and (opens or event in _CHANGING) and next(calls) == instant:
            function()

    sys.addaudithook(hook)
    return calls


def fork(function: Callable[[], int]) -> int:
    """Call a function in a process of its own, which it may end, and return the exit code: of an error, 1."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(function())
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_any_instant_is_complete(tmp_path: Path) -> None:
    """A job stores the step that one before it had stored, keeps one, and dies before any call that changes a file."""
    put(tmp_path / "s1", job(1), 4)
    put(tmp_path / "s2", job(2), 4)
    ends: list[tuple[int, int] | None] = []
    for instant in itertools.count():
        url = tmp_path / f"c{instant}"
        write(url, tmp_path / "s1")

        def die() -> int:
            _call_at(instant, str(url), lambda: os._exit(_KILLED))  # noqa: B023
            write(url, tmp_path / "s2", run=SECOND, keep=1)  # noqa: B023
            return 0

        code = fork(die)
        assert code in (0, _KILLED)
        ends.append(stored(url))
        if code == 0:
            break
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == ((4, 1), (4, 2))
    assert names(str(url)) == [f"step-4.g-1.r-{SECOND}"]


def test_a_mark_at_any_instant_is_kept(tmp_path: Path) -> None:
    """A worker marks a newer state, at any instant of the storing of the one before: it is stored next."""
    newer = job(5)
    for instant in itertools.count():
        prefix, url = tmp_path / f"s{instant}", tmp_path / f"c{instant}"
        put(prefix, job(1), 1)

        def mark() -> int:
            calls = _call_at(instant, str(prefix), lambda: put(prefix, newer, 5), reads=True)  # noqa: B023
            writer = storing(url)  # noqa: B023
            while find_marked_slots(prefix):  # noqa: B023
                writer.write_newest([prefix], marked=True)  # noqa: B023
            return _NEVER if next(calls) <= instant else 0  # noqa: B023

        code = fork(mark)
        assert code in (0, _NEVER)
        if code == _NEVER:
            break
        assert newest_stored(str(url))[1] == 5, f"it was marked at instant {instant}"
    assert instant > 5


def test_failing_storage_is_temporary(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("not a folder")
    put(tmp_path / "s", job(1), 1)
    with pytest.raises(TemporaryError, match="did not accept step 1"):
        write(tmp_path / "c", tmp_path / "s")
    with pytest.raises(SettingsError, match="nowhere"):
        storing("nowhere://x")


def test_worker_stores_without_an_agent(tmp_path: Path, url: str) -> None:
    source = job(3)
    with Checkpointer(source, interval_steps=1, storage=url, storage_interval_s=3600.0) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1, force=True)
        wait_until(lambda: newest_stored(url, None)[1] == 1, "it is stored")
        for step in range(2, 4):
            checkpointer.save(step)
        checkpointer.save(4, force=True)
    with Checkpointer(job(5), storage=url) as checkpointer:
        assert checkpointer.restore() == 4
        assert checkpointer.state.epoch == 3


def test_storage_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Checkpointer(job(3), storage=Path("kept")) as checkpointer:
        checkpointer.save(0)
    monkeypatch.setenv("EDL_CHECKPOINT", "kept")
    with Checkpointer(job(5)) as checkpointer:
        monkeypatch.chdir("/")
        assert checkpointer.restore() == 0


@pytest.mark.parametrize(
    ("stored", "order"),
    [
        ("5.g-1 9.g-1 7.g-2", "7.g-2 5.g-1 9.g-1"),
        ("9.g-1 9.g-2", "9.g-2 9.g-1"),
        ("9.g-1 12.g-2", "12.g-2 9.g-1"),
        ("9.g-1 5.g-0 3.g-3", "3.g-3 9.g-1 5.g-0"),
        ("9.g-3 5.g-0", "9.g-3 5.g-0"),
        (f"9.g-1 7.g-2.r-{SECOND}", f"9.g-1 7.g-2.r-{SECOND}"),  # of two runs
    ],
)
def test_given_up_checkpoints_come_last(stored: str, order: str) -> None:
    """A later generation that stored step 7 had not gone on from step 9 of an earlier one."""

    def named(texts: str) -> list[str]:
        return [f"step-{text}" if ".r-" in text else f"step-{text}.r-{FIRST}" for text in texts.split()]

    found = [CheckpointName.parse(text) for text in named(stored)]
    assert None not in found
    assert [str(name) for name in newest_first(found)] == named(order)


def test_given_up_checkpoints_go_first(tmp_path: Path) -> None:
    for generation, step in ((1, 10), (1, 11), (1, 12), (2, 5), (2, 6)):
        put(tmp_path / f"s{step}", job(generation), step, generation=generation)
        write(tmp_path / "c", tmp_path / f"s{step}", keep=3)
    left = {path.name.partition(".r-")[0] for path in (tmp_path / "c").iterdir()}
    assert left > {"step-6.g-2", "step-5.g-2"}
    assert len(left) == 3
    assert stored(tmp_path / "c") == (6, 2), "what was given up does not come back"


def save(slots: SlotPair, step: int, rank: int = 0, *, persist: bool = True) -> None:
    save_state(slots, job(step), SlotHeader(1, step, 2, rank, persist=persist))


def test_workers_go_on_while_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks' states are stored as they were marked, however often their slots are written meanwhile."""
    prefixes = [tmp_path / f"s{rank}" for rank in range(2)]
    slots, write_together = [SlotPair(prefix) for prefix in prefixes], CheckpointWriter._write_together

    def save_all(*steps: int, marked: int) -> None:
        for step, rank in itertools.product(steps, range(2)):
            save(slots[rank], step, rank, persist=step == marked)

    def write_late(self: CheckpointWriter, *arguments: Any) -> None:
        save_all(3, 4, 5, 6, marked=4)
        write_together(self, *arguments)

    save_all(0, 1, 2, marked=0)
    writer = storing(tmp_path / "c")
    with monkeypatch.context() as slow:
        slow.setattr(CheckpointWriter, "_write_together", write_late)
        assert writer.write_newest(prefixes, marked=True) == (0, True), "though four others came"
    assert stored(tmp_path / "c") == (0, 0)
    assert writer.write_newest(prefixes, marked=True) == (4, True), "the newest marked since"
    assert stored(tmp_path / "c") == (4, 4)
    assert {path.name for path in tmp_path.glob("s0*")} == {"s0.0", "s0.1"}, "nothing is held once it is stored"


def test_mark_that_others_lack_is_removed(tmp_path: Path) -> None:
    """A rank paused after step 1 and marked it; the pause was taken back before the other rank had seen it."""
    prefixes = [tmp_path / f"s{rank}" for rank in range(2)]
    slots = [SlotPair(prefix) for prefix in prefixes]
    writer = storing(tmp_path / "c")
    save(slots[0], 1, 0)
    assert writer.write_newest(prefixes, marked=True) is None
    assert slots[0].has_marked_slot, "the other rank may mark it yet"
    save(slots[1], 1, 1, persist=False)
    assert writer.write_newest(prefixes, marked=True) is None
    assert slots[0].has_marked_slot, "it may be just before it"
    save(slots[1], 2, 1, persist=False)
    assert writer.write_newest(prefixes, marked=True) is None
    assert not slots[0].has_marked_slot
    for rank in range(2):
        save(slots[rank], 3, rank)
    assert writer.write_newest(prefixes, marked=True) == (3, True)


@pytest.mark.parametrize("marked", [False, True])
def test_late_write_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """The worker looked at the file's names, the file was pinned, and then the worker began to write to it."""
    slots = SlotPair(tmp_path / "s")
    save(slots, 1, 0)
    pin = CompleteSlot.pin_file

    def pin_too_late(self: CompleteSlot, name: Path) -> PinnedSlot | None:
        pinned = pin(self, name)
        with self.path.open("r+b") as file:  # as `begin_write` does after that look
            file.seek(8)
            file.write((self.sequence + 1).to_bytes(8, "little"))
        return pinned

    monkeypatch.setattr(CompleteSlot, "pin_file", pin_too_late)
    writer = storing(tmp_path / "c")
    if marked:
        assert writer.write_newest([tmp_path / "s"], marked=True) is None
    else:
        with pytest.raises(TemporaryError, match="step 1 was overwritten before it was stored"):
            writer.write_newest([tmp_path / "s"])
    assert restore_from_storage(job(9), str(tmp_path / "c")) is None
    monkeypatch.undo()
    save(slots, 2, 0)
    half = writer.write_newest([tmp_path / "s"], marked=marked)
    assert half is not None, "and the next state is stored"


class ApiError(Exception):
    """What a library of an object store raises, which knows nothing of OSError."""


class Balky(MemoryFileSystem):
    """A storage that calls `before` whenever a file is to be opened, and may be full after so many writes to it."""

    protocol = "balky"
    storage: Storage

    def _open(self, *arguments: Any, **settings: Any) -> Any:
        self.storage.before()
        file = super()._open(*arguments, **settings)
        write, written = file.write, itertools.count()

        def some(data: Any) -> Any:
            if next(written) >= self.storage.writes:
                raise OSError(122, "Disk quota exceeded")
            return write(data)

        file.write = some
        return file


class Storage:
    """A storage, an agent's persister, and what that says."""

    def __init__(self, prefix: Path) -> None:
        self.url, self.prefix = f"balky://edl-{uuid.uuid4().hex}", prefix
        self.before: Callable[[], object] = lambda: None
        self.writes = 1 << 30
        self.lines: list[str] = []
        self.persisters: list[CheckpointPersister] = []

    def put(self, step: int) -> None:
        put(self.prefix, State(values=torch.full((10,), step)), step)

    def persister(self, *, start: bool = True, **settings: Any) -> CheckpointPersister:
        settings = {"run": lambda: FIRST, "report_stored": self.lines.append, "poll_s": 0.02, **settings}
        made = CheckpointPersister(self.url, [self.prefix], self.lines.append, **settings)
        self.persisters.append(made)
        if start:
            made.start()
        return made

    def wait_stored(self, step: int) -> None:
        wait_until(lambda: any(f"stored the state after step {step} at" in line for line in self.lines), "it is stored")


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    fsspec.register_implementation("balky", Balky, clobber=True)
    made = Storage(tmp_path / "s")
    monkeypatch.setattr(Balky, "storage", made, raising=False)
    yield made
    made.before = lambda: None
    for persister in made.persisters:  # what they still write would come back behind its removal
        persister.close(DEADLINE_S)
    fs, root = fsspec.core.url_to_fs(made.url)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def fail(error: Exception, times: int = 1 << 30) -> Callable[[], object]:
    """Return a function that raises an error so many times."""
    left = iter(range(times))

    def before() -> None:
        if next(left, None) is not None:
            raise error

    return before


@pytest.mark.parametrize("error", [ApiError("slow down"), MemoryError("memory"), None])
def test_next_state_is_stored_after_errors(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    storage.put(1)
    with monkeypatch.context() as broken:
        if error is None:
            broken.setattr(CheckpointWriter, "_store_slots", lambda *arguments: 1 / 0)
        else:
            storage.before = fail(error)
        persister = storage.persister()
        wait_until(lambda: storage.lines, "the failure is reported")
        assert (str(error) if error else "bug in EDL") in storage.lines[0]
    storage.before = lambda: None
    storage.put(2)
    persister.store_newest()
    storage.wait_stored(2)
    assert persister.close(DEADLINE_S)


def test_unknown_states_are_not_stored(storage: Storage) -> None:
    storage.put(1)
    persister = storage.persister(start=False)
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    fs, root = fsspec.core.url_to_fs(storage.url)
    assert not fs.exists(root)


def test_job_end_retries_the_last_state(storage: Storage) -> None:
    storage.before = fail(ApiError("slow down"), times=2)
    persister = storage.persister()
    storage.put(1)
    persister.store_newest()
    assert persister.close(DEADLINE_S, patient=True)
    storage.wait_stored(1)


@pytest.mark.parametrize("patient", [False, True])
def test_storage_that_takes_nothing_is_left(storage: Storage, patient: bool) -> None:
    released = threading.Event()
    storage.before = lambda: released.wait(DEADLINE_S)
    storage.put(1)
    persister = storage.persister()
    persister.store_newest()
    try:
        assert not persister.close(0.3, patient=patient)
        assert "left incomplete" in storage.lines[-1]
    finally:
        released.set()


class Clock:
    """A clock for a persister: a file takes two seconds of it, and a thread that waits notices each file."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting = threading.current_thread()
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += threading.current_thread() is self._waiting
        return self.now_s

    def take_file(self) -> None:
        seen = self._looks
        wait_until(lambda: self._looks > seen + 3)  # at most two a round: it has seen what was written before
        self.now_s += 2.0


def test_job_end_waits_for_slow_storage(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes less than the limit, and all of them together more."""
    clock = Clock()
    monkeypatch.setattr(persister_module, "time", clock)
    storage.before = clock.take_file
    storage.put(1)
    persister = storage.persister()
    persister.store_newest()
    assert persister.close(2.5, patient=True)
    assert clock.now_s > 2.5
    storage.wait_stored(1)


def test_agents_agree_on_a_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with open_store(url) as first, open_store(url) as second:
        run = JobRun(first, "job")()
        assert (JobRun(second, "job")(), JobRun(first, "job")()) == (run, run)
        assert JobRun(second, "another")() != run
        named = JobRun(first, "job")
        assert named() == run
        first.delete("jobs/job/run")
        assert (named(), JobRun(second, "job")()) == (run, run), "a store that lost its records learns it again"
        first.put("jobs/third/run", b"../..")
        with pytest.raises(ProtocolError, match="not the name of a run"):
            JobRun(second, "third")()


def test_full_storage_is_not_waited_for(storage: Storage) -> None:
    """Each attempt gets as far as the one before it."""
    storage.writes = 2
    storage.put(1)
    persister = storage.persister()
    wait_until(lambda: storage.lines, "the failure is reported")
    assert "quota" in storage.lines[0]
    assert persister._writer.written_nbytes > 0
    persister.store_newest()
    assert not persister.close(0.3, patient=True)


@pytest.mark.parametrize("how", ["the block ends", "sys.exit()", "an error", "close"])
def test_worker_alone_ends_well_if_stored(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr(persister_module, "_WORKER_RETRY_S", 0.3)
    storage.before = fail(ApiError("slow down"))
    words = f"the last state is not at {storage.url}; earlier checkpoints are unchanged: .*slow down"
    ends = {
        "the block ends": pytest.raises(TemporaryError, match=words),
        "sys.exit()": pytest.raises(TemporaryError, match=words),
        "an error": pytest.raises(LookupError, match="the script's own"),
        "close": contextlib.nullcontext(),
    }
    with ends[how], Checkpointer(State(step=0), storage=storage.url, interval_steps=1) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, force=True)
        if how == "sys.exit()":
            sys.exit()
        if how == "an error":
            raise LookupError("the script's own")
        if how == "close":
            checkpointer.close()
    assert how in ("the block ends", "sys.exit()") or re.search(words, caplog.records[-1].getMessage())
