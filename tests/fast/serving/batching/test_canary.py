"""The canary: a teacher whose model fails is not ready and not in discovery, until it answers again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import Registry
from edl.protocol.transport import grpc
from edl.settings import LoadSettings
from edl_serving import Array
from edl_serving.batching.canary import Canary
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.settings import RegistrationSettings
from edl_serving.registration.teacher import TeacherRegistration
from edl_serving.request_error import RequestError
from tests.fast.serving.conftest import TIMEOUT_S, Connect, StartInside
from tests.fast.serving.fakes import FakeBackend, five_logits, model_of
from tests.waiting import wait_until

ROW = {"x": np.ones((1, 4), np.float32)}


class MoodyModel(FakeBackend):
    """Answers as it is told to, and its sample is sevens."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.mood = ""
        self.gate = threading.Event()
        self.gate.set()

    def sample(self, rows: int) -> Mapping[str, Array]:
        return {"x": np.full((rows, 4), 7, np.float32)}

    def _answer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        assert self.gate.wait(TIMEOUT_S)
        if self.mood == "raise" or (inputs["x"] != 7).any():
            raise ValueError("in a bad mood")
        answer = five_logits(inputs)
        return {"logits": np.full_like(answer["logits"], np.nan) if self.mood == "nan" else answer["logits"]}


@pytest.mark.parametrize(("how", "words"), [("raise", "in a bad mood"), ("nan", "NaN"), ("hang", "no answer within")])
def test_a_sick_model_is_not_found(
    inside: StartInside,
    connect: Connect,
    url: str,
    registry: Registry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
    words: str,
) -> None:
    model = MoodyModel()
    server = inside(model, canary_s=0.01, canary_timeout_s=0.5 if how == "hang" else TIMEOUT_S)
    client = connect(server.target)
    settings = RegistrationSettings("s", url, ttl_s=300.0, load=LoadSettings(publish=False))
    with (
        ReadyFile(str(tmp_path / "ready")) as file,
        TeacherRegistration(settings, "127.0.0.1", 0.0, file) as registration,
    ):
        registration.register(server.server)
        for _ in range(2):
            wait_until(lambda: registry.snapshot("s").instances, "it is in discovery")
            wait_until(lambda: server.metric("edl_teacher_healthy") == 1 and client.ask("ModelReady", name="m").ready)
            wait_until((tmp_path / "ready").exists)
            before = server.metric("edl_teacher_rows_total")
            wait_until(lambda before=before: server.metric("edl_teacher_rows_total") > before, "its sample is computed")
            model.mood = how
            if how == "hang":
                model.gate.clear()
            wait_until(lambda: not registry.snapshot("s").instances, "it leaves discovery")
            assert not client.ask("ModelReady", name="m").ready
            assert server.metric("edl_teacher_healthy") == 0
            assert not (tmp_path / "ready").exists()
            assert words in caplog.text
            model.mood = ""
            model.gate.set()
        model.mood = "raise"
        wait_until(lambda: not server.server.ready)
        registration.start_draining()
        assert server.call(server.server.drain(TIMEOUT_S / 2)), "a sick teacher drains"


class Full:
    """A batcher whose queue is full."""

    def __init__(self, progresses: bool) -> None:
        self.computed, self.progresses = 0, progresses

    @property
    def computed_rows(self) -> int:
        self.computed += self.progresses
        return self.computed

    async def compute(self, job: object) -> None:
        raise RequestError(grpc.StatusCode.UNAVAILABLE, "the queue is full", 10, "queue")


@pytest.mark.parametrize("progresses", [True, False])
def test_a_full_queue_hides_no_hang(progresses: bool) -> None:
    """A queue that is full of others' requests says nothing of the model, unless nothing is computed meanwhile."""
    changes: list[bool] = []

    async def changed(healthy: bool) -> None:
        changes.append(healthy)

    async def run() -> None:
        batcher: Any = Full(progresses)
        task = asyncio.create_task(Canary(batcher, model_of(FakeBackend()), ROW, 0.0, 0.02, changed).run())
        while batcher.computed < 50 if progresses else not changes:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert changes == ([] if progresses else [False])
