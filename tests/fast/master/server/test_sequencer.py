"""Answers come after the journal, in groups; without a journal there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edl.errors import ClosedError, ConflictError, JournalError
from edl.master.server.sequencer import Sequencer
from edl.protocol import master as messages
from tests.fast.master.server.journals import GatedJournal


class Book:
    def __init__(self) -> None:
        self.version = 0
        self.applied: list[str] = []

    def apply(self, command: messages.Command) -> Any:
        name = command.end_dataset.dataset
        if name == "refused":
            raise ConflictError("refused")
        if name != "again":
            self.version += 1
            self.applied.append(name)
        return name

    def snapshot(self) -> bytes:
        return ",".join(self.applied).encode()


def command(name: str) -> messages.Command:
    return messages.Command(end_dataset=messages.EndDataset(dataset=name))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


def run(scenario: Any) -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        journal, book = GatedJournal(), Book()
        sequencer = Sequencer(book, journal, failures.append)
        try:
            await asyncio.wait_for(scenario(sequencer, book, journal, failures), 30)
        finally:
            sequencer.end(ClosedError("the test is over"))
            journal.gate.release(100)
            await asyncio.to_thread(sequencer.join)

    asyncio.run(main())


def test_answers_come_after_the_journal() -> None:
    async def scenario(sequencer: Sequencer, book: Book, journal: GatedJournal, failures: list[Any]) -> None:
        answer = asyncio.ensure_future(sequencer.submit(command("a")))
        await settle()
        assert book.applied == ["a"]
        assert not answer.done()
        journal.gate.release()
        assert await answer == "a"
        assert journal.groups == [[command("a").SerializeToString()]]

    run(scenario)


def test_commands_share_a_commit() -> None:
    async def scenario(sequencer: Sequencer, book: Book, journal: GatedJournal, failures: list[Any]) -> None:
        first = asyncio.ensure_future(sequencer.submit(command("a")))
        await settle()
        rest = [asyncio.ensure_future(sequencer.submit(command(f"b{number}"))) for number in range(20)]
        await settle()
        journal.gate.release(2)
        assert await asyncio.gather(first, *rest) == ["a", *(f"b{number}" for number in range(20))]
        assert [len(group) for group in journal.groups] == [1, 20]

    run(scenario)


@pytest.mark.parametrize("name", ["refused", "again"])
def test_refusals_wait_for_what_they_rest_on(name: str) -> None:
    """A refusal, and the answer to a request that came again, may rest on a command that is not journalled yet."""

    async def scenario(sequencer: Sequencer, book: Book, journal: GatedJournal, failures: list[Any]) -> None:
        first = asyncio.ensure_future(sequencer.submit(command("a")))
        second = asyncio.ensure_future(sequencer.submit(command(name)))
        await settle()
        assert not second.done()
        journal.gate.release()
        await first
        found = await asyncio.gather(second, return_exceptions=True)
        assert isinstance(found[0], ConflictError) if name == "refused" else found == ["again"]
        assert [len(group) for group in journal.groups] == [1]

    run(scenario)


def test_a_failed_journal_answers_nothing() -> None:
    async def scenario(sequencer: Sequencer, book: Book, journal: GatedJournal, failures: list[Any]) -> None:
        answers = [asyncio.ensure_future(sequencer.submit(command(name))) for name in "abc"]
        await settle()
        journal.failure = JournalError("the disk is full")
        journal.gate.release(3)
        for answer in answers:
            with pytest.raises(ClosedError, match="the disk is full"):
                await answer
        assert [str(failure) for failure in failures] == ["the disk is full"]
        with pytest.raises(ClosedError, match="the disk is full"):
            await sequencer.submit(command("d"))
        with pytest.raises(ClosedError, match="the disk is full"):
            await sequencer.settled()
        assert "d" not in book.applied

    run(scenario)


def test_a_snapshot_has_its_place() -> None:
    async def scenario(sequencer: Sequencer, book: Book, journal: GatedJournal, failures: list[Any]) -> None:
        journal.gate.release(10)
        await sequencer.submit(command("a"))
        sequencer.take_snapshot()
        await sequencer.submit(command("b"))
        assert journal.snapshots == [b"a"]
        assert journal.groups == [[command("a").SerializeToString()], [command("b").SerializeToString()]]

    run(scenario)


def test_journal_asks_for_a_snapshot() -> None:
    """One, of the state that its records make, even while others wait to be written."""

    async def scenario(sequencer: Any, book: Any, journal: Any, failures: Any) -> None:
        for number in range(9):
            journal.gate.release()
            await sequencer.submit(command(f"c{number}"))
        await settle()
        assert len(journal.snapshots) == 1
        covered = journal.snapshots[0].decode().split(",")
        assert covered == book.applied[: len(covered)]
        assert 5 <= len(covered) <= 7

    run(scenario)
