"""A CRD is deleted while watches of pods have no answer yet: what hinders kopf from ending is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from edl.master.kube.operator import resource_watches
from tests.waiting import DEADLINE_S


def test_hung_watches_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before kopf ends, and neither EDL's own tasks nor what kopf takes for a reason to watch anew."""
    monkeypatch.setattr(resource_watches, "_HUNG_S", 0.0)
    monkeypatch.setattr(resource_watches, "_HUNG_AGAIN_S", 0.0)

    async def scenario() -> None:
        ending, never = asyncio.Event(), asyncio.Event()
        own = asyncio.create_task(never.wait(), name="own")
        pause = asyncio.create_task(never.wait(), name=f"{resource_watches._PAUSE_WAITER} for pods")
        ours = {*asyncio.all_tasks()} - {pause}
        hung = asyncio.create_task(never.wait(), name="watcher for pods")
        looking = asyncio.create_task(resource_watches._end_hung(ending, ours))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not hung.done()
        ending.set()
        await asyncio.wait([hung], timeout=DEADLINE_S)
        assert hung.cancelled()
        assert not own.done()
        assert not pause.done()
        for task in (looking, own, pause):
            task.cancel()

    asyncio.run(scenario())
