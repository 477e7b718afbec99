"""What becomes of a request whose task is cancelled before it has begun."""

from __future__ import annotations

import asyncio

import numpy as np

from edl.distill.dispatch.actions import Send
from edl.distill.dispatch.policy import Policy
from edl.distill.engine.engine import Engine
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.engine.job import LabelJob
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import OutputSpec

TIMEOUT_S = 20.0


def test_request_cancelled_unstarted_ends() -> None:
    """A reader breaks out of an epoch in the same turn of the loop: a task that never began runs no `finally`."""
    thread = EventLoopThread.acquire()
    engine = Engine(
        "x", OutputSpec(outputs=("y",)), thread=thread, arena=None, policy=Policy(), teacher_timeout_s=TIMEOUT_S
    )
    job = LabelJob(
        0, Payload.of({"x": np.zeros((2, 3), "float32")}, None), lambda *_: None, lambda: None, open_attempts=1
    )

    async def cancel_at_once() -> None:
        send = Send(attempt=7, task=0, teacher="gone", timeout_s=TIMEOUT_S, extra=False)
        engine._attempts[send.attempt] = engine._start(send, job)
        engine._attempts[send.attempt]()
        await asyncio.sleep(0)  # the task is cancelled
        await asyncio.sleep(0)  # and what it left undone is done

    try:
        thread.run(cancel_at_once(), TIMEOUT_S)
        assert not engine._attempts
        assert job.open_attempts == 0
        thread.run(engine.close(), TIMEOUT_S)
    finally:
        thread.release()
