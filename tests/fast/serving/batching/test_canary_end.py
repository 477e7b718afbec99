"""The canary ends with its server, whatever it is waiting for at that moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edl_serving.batching import canary as module
from edl_serving.batching.canary import Canary


class AnsweringBatcher:
    """Answers a row when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def compute(self, job: object) -> None:
        self.asked.set()
        await self.answers.wait()


async def end(turns: int) -> bool:
    """Cancel a canary some turns of the loop after its row was answered; return whether it has ended."""
    batcher = AnsweringBatcher()
    canary: Any = object.__new__(Canary)
    vars(canary).update(_batcher=batcher, _every_s=0.0, _timeout_s=60.0, _request=None, _model="m", healthy=True)
    task = asyncio.create_task(canary.run())
    await asyncio.wait_for(batcher.asked.wait(), 60)
    batcher.answers.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    batcher.answers.clear()
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return ended


@pytest.mark.parametrize("turns", range(8))
def test_cancelled_canary_ends(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`asyncio.wait_for` before Python 3.12 loses a cancellation that comes together with the answer."""
    monkeypatch.setattr(module.InferenceJob, "of", lambda *arguments: None)
    assert asyncio.run(end(turns))
