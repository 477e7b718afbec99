"""A term over a journal whose commits wait for the test: what becomes of calls whose worker dies meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from edl.errors import LeaseLostError
from edl.master.server.term import Term
from edl.master.shards import ShardBook
from edl.protocol import master as messages
from tests.fast.master.server.journals import GatedJournal

SPEC = messages.DatasetSpec(kind="range", units=100, shard_size=10, epochs=1, session_s=0.2, lease_s=0.2)


async def begin(journal: GatedJournal) -> Term:
    """Begin a term with a data set, and leave the journal's gate shut."""
    journal.gate.release(2)
    term = Term(1, ShardBook(), journal, lambda seconds: None)
    await term.begin(0)
    await term.submit(messages.Command(create_dataset=messages.CreateDataset(dataset="d", spec=SPEC)))
    return term


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


def test_session_of_a_cancelled_call_ends() -> None:
    """A worker dies while its session is being journalled: the session must end like any other."""

    async def scenario() -> None:
        journal = GatedJournal()
        term = await begin(journal)
        opening = asyncio.ensure_future(term.open_session(messages.OpenSession(dataset="d", session="s", holder="w")))
        await settle()
        opening.cancel()  # as gRPC does
        await asyncio.wait([opening])
        assert opening.cancelled()
        journal.gate.release(100)
        assert term.book.sessions() == ["s"]
        deadline = time.monotonic() + 20
        while term.book.sessions():
            assert time.monotonic() < deadline, "the session never ends"
            await asyncio.sleep(0.05)
            await term.tick()
        with pytest.raises(LeaseLostError, match="lease of w expired"):
            await term.turn(messages.Turn(session="s", request=1, want=1))
        await term.close("the test is over")

    asyncio.run(asyncio.wait_for(scenario(), 40))
