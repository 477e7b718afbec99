"""Saves that are copied beside the next forward and backward pass."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory import copying
from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from edl.collective.checkpoint.memory.slots import SlotPair, find_slots
from edl.collective.checkpoint.state.metadata import parse_meta
from edl.collective.checkpoint.state.state import State
from edl.collective.worker_status import Phase, WorkerStatusPage

WIDTH = 1200  # with momentum some 11 MB, which are worth a thread


@pytest.fixture
def state() -> State:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = State(rng=False, model=model, optimizer=optimizer, note=torch.zeros(2_000_000))
    train(made)
    return made


class Held:
    """Copying does not get on while this is held."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def work(self, job: object) -> None:
        assert self.go.wait(20)
        WORK(job)  # type: ignore[arg-type]


WORK = copying._Job.work


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """The helping thread, to be stopped."""
    held = Held()

    def submit(self: copying.TensorCopier, job: object) -> None:
        threading.Thread(target=held.work, args=(job,), daemon=True).start()

    monkeypatch.setattr(copying.TensorCopier, "_submit", submit)
    yield held
    held.go.set()


def train(state: State) -> None:
    loss = state.model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def tensors(state: State) -> dict[str, torch.Tensor]:
    captured = state.capture()
    return {entry.key: tensor.clone() for entry, tensor in zip(captured.entries, captured.tensors, strict=True)}


def saved(prefix: Path, step: int) -> dict[str, torch.Tensor]:
    """The newest state in the slots, which has to be that after `step`."""
    found = find_slots(prefix)[0]
    assert found.header.step == step
    copy = found.copy_contents()
    assert copy is not None
    loaded: dict[str, torch.Tensor] = {}
    for entry in parse_meta(copy.meta).entries:
        data = bytes(copy.data[entry.offset : entry.offset + entry.nbytes])
        loaded[entry.key] = torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
    return loaded


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[key], others[key]) for key in some)


def test_saved_state_is_that_before_the_step(tmp_path: Path, state: State, helper: Held) -> None:
    """What was saved is the state before the next step and everything else before."""
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(6):
            train(state)
            if step > 1:  # both slots have their memory
                helper.go.clear()
            before = tensors(state)
            assert checkpointer.save(step)
            if step > 1:
                assert find_slots(tmp_path / "slots")[0].header.step == step - 1  # so it is under way
            state.note += 1
            state.model(torch.randn(4, WIDTH))  # changes what batch normalization remembers
            assert not same(before, tensors(state))
            train(state)  # waits, and copies, since nobody else does
            assert same(saved(tmp_path / "slots", step), before)
            helper.go.set()


def test_other_change_drops_the_save(
    tmp_path: Path, state: State, helper: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """A change by other means drops the save and ends overlapping."""
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(2):
            checkpointer.save(step)
        before = tensors(state)
        train(state)
        helper.go.clear()
        checkpointer.save(2)
        with torch.no_grad():
            state.model[0].weight.clamp_(-0.01, 0.01)
        assert not checkpointer.wait_until_finished()
        assert same(saved(tmp_path / "slots", 1), before)
        assert "from now on saves wait for the copy" in caplog.text
        checkpointer.save(3)
        assert same(saved(tmp_path / "slots", 3), tensors(state))  # at once: nobody helps


def test_change_after_the_copy_spoils_it(tmp_path: Path, state: State) -> None:
    """torch counts a write only when it is done, so this may have been one in the middle of the copy."""
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(3):
            train(state)
            checkpointer.save(step)
        deadline = time.monotonic() + 20
        while find_slots(tmp_path / "slots")[0].header.step != 2:
            assert time.monotonic() < deadline
        with torch.no_grad():
            state.model[0].weight.add_(1)
        train(state)
        assert find_slots(tmp_path / "slots")[0].header.step == 1


def test_without_overlap_save_is_complete(tmp_path: Path, state: State, helper: Held) -> None:
    """Without overlap a save is complete when it returns."""
    helper.go.clear()
    with Checkpointer(state, interval_steps=1, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(4):
            train(state)
            checkpointer.save(step)
            assert same(saved(tmp_path / "slots", step), tensors(state))


def test_an_end_without_close_loses_nothing(tmp_path: Path, state: State, helper: Held) -> None:
    checkpointer = Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots"))
    for step in range(3):
        train(state)
        checkpointer.save(step)
    assert checkpointer.wait_until_finished()
    assert same(saved(tmp_path / "slots", 2), tensors(state))
    checkpointer.close()
    train(state)  # the optimizer waits for nobody any more


def test_unowned_tensors_are_copied_at_once(tmp_path: Path, helper: Held) -> None:
    """What no optimizer owns is copied at once."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    helper.go.clear()
    with Checkpointer(
        State(model=model), interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")
    ) as checkpointer:
        for step in range(4):
            checkpointer.save(step)
            assert find_slots(tmp_path / "slots")[0].header.step == step


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it compiles
def test_compiled_step_is_waited_for(tmp_path: Path, state: State) -> None:
    """Whether the compiler runs hooks or leaves them out is its own business."""
    step = torch.compile(state.optimizer.step, backend="eager")
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for number in range(6):
            for parameter in state.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            before = tensors(state)
            step()
            if number:
                assert same(saved(tmp_path / "slots", number - 1), before)
            checkpointer.save(number)


def test_uncounted_change_is_seen_by_samples(tmp_path: Path, state: State, helper: Held) -> None:
    """Averaged weights are swapped in for an evaluation, through `.data`."""
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(2):
            train(state)
            checkpointer.save(step)
        before = tensors(state)
        train(state)
        helper.go.clear()
        checkpointer.save(2)
        for parameter in state.model.parameters():
            parameter.data.mul_(0.5)
        assert not checkpointer.wait_until_finished()
        assert same(saved(tmp_path / "slots", 1), before)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_storage_copies_are_made_at_once(tmp_path: Path, state: State, helper: Held) -> None:
    """What goes to storage is copied at once."""
    url = str(tmp_path / "stored")
    settings = {"storage": url, "storage_interval_s": 1e-9}
    slots, at_once = SlotPair(tmp_path / "slots"), 0
    with Checkpointer(
        state,
        interval_steps=1,
        overlap=True,
        slots=slots,
        **settings,  # type: ignore[arg-type]
    ) as checkpointer:
        for step in range(12):
            until(lambda: not slots.has_marked_slot)  # the next one is wanted only when the one before is stored
            train(state)
            wanted = checkpointer._store_next
            if wanted:
                helper.go.clear()
            checkpointer.save(step)
            if wanted:
                assert find_slots(tmp_path / "slots")[0].header.step == step
                at_once += 1
            helper.go.set()
    assert at_once >= 3


def test_kept_state_is_kept_at_once(
    tmp_path: Path, state: State, helper: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next save would be kept as well, in the place of the only state that other nodes have."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    monkeypatch.setenv("EDL_REPLICAS", str(folder.path))
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        replica_slots = checkpointer._replica_slots
        assert replica_slots is not None
        for step in range(5):
            train(state)
            if step == 4:
                folder.request_newer_than((0, 3, 1))
                checkpointer._keep_next = True  # as all ranks of a sharded state would have agreed
                helper.go.clear()
            checkpointer.save(step)
        assert [found.header.step for found in replica_slots.slots.find_complete()] == [4]
        assert not replica_slots.is_state_requested()
        helper.go.set()


def test_waiting_steps_count_as_saving(tmp_path: Path, state: State, helper: Held) -> None:
    """The time that a step waits counts as saving."""
    board = WorkerStatusPage.create(tmp_path / "board")
    board.record_worker_start(1)
    slots = SlotPair(tmp_path / "slots")
    with Checkpointer(state, interval_steps=1, overlap=True, slots=slots, board=board) as checkpointer:
        for step in range(3):
            train(state)
            checkpointer.save(step)
        phases = []
        finish = checkpointer._writer._copier.finish_copy
        checkpointer._writer._copier.finish_copy = lambda: (phases.append(board.read_status().phase), finish())  # type: ignore
        helper.go.clear()
        train(state)
        checkpointer.save(3)
        phases.clear()  # of the save itself
        train(state)
        assert phases == [Phase.SAVE]
    board.close()


def test_fork_does_not_finish_the_save(tmp_path: Path, state: State, helper: Held) -> None:
    """A fork does not finish its parents save."""
    with Checkpointer(state, interval_steps=1, overlap=True, slots=SlotPair(tmp_path / "slots")) as checkpointer:
        for step in range(2):
            train(state)
            checkpointer.save(step)
        train(state)
        helper.go.clear()
        checkpointer.save(2)
        child = os.fork()
        if child == 0:
            os._exit(3 if checkpointer.wait_until_finished() else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        assert find_slots(tmp_path / "slots")[0].header.step == 1
