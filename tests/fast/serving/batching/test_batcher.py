"""Batches over the wire: the bounded queue, what nobody waits for, draining and the end, with a model that waits."""

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
from tests.fast.serving.conftest import TIMEOUT_S, Connect, StartInside, outputs_of, request_bytes
from tests.fast.serving.fakes import FakeBackend, five_logits, model_of
from tests.fast.serving.models import Gated, Mixed, logits
from tests.waiting import wait_until


def rows(count: int, value: float = 1.0) -> Array:
    return np.full((count, 4), value, np.float32)


def test_one_shape_shares_a_batch(inside: StartInside, connect: Connect) -> None:
    """An idle model waits for `max_delay_s`, so that requests of one shape join."""
    server = inside(Mixed(), max_batch_rows=2, max_delay_s=60.0)
    client = connect(server.target)
    words = np.array([[b"a", b"b"]], object)
    widths = [1, 2, 3, 3, 1, 2]
    calls = [
        client.infer_bytes.future(
            request_bytes({"x": np.ones((1, width), np.float32), "words": words}), timeout=TIMEOUT_S
        )
        for width in widths
    ]
    assert [outputs_of(call.result())["width"].tolist() for call in calls] == [[width] for width in widths]
    assert server.metric("edl_teacher_batch_rows_count") == 3


def test_what_never_fits_is_said(inside: StartInside, connect: Connect) -> None:
    """In place of a hint when to come again: an empty queue would have no room either, and the student ask for ever."""
    client = connect(inside(Mixed(), max_message_bytes=15_000, max_queue_bytes=15_000, max_queue_rows=200).target)
    # 200 rows of strings are 2,400 bytes in the message, and 16,400 more in memory.
    for rows, said in ((200, "15,000.*--max-queue-bytes"), (201, "has 201 rows; this server takes 200")):
        x, words = np.ones((rows, 1), np.float32), np.full((rows, 2), b"ab", object)
        with pytest.raises(grpc.RpcError, match=f"(?s)INVALID_ARGUMENT.*{said}"):
            client.infer_bytes(request_bytes({"x": x, "words": words}), timeout=TIMEOUT_S)


def test_cancelled_requests_are_not_computed(inside: StartInside, connect: Connect) -> None:
    """Neither of a client that cancels nor of one that vanishes; nobody else is harmed."""
    model = Gated()
    server = inside(model, max_batch_rows=4)
    client, vanishing = connect(server.target), connect(server.target)
    computed = client.start(rows(1, 0))
    wait_until(model.started.is_set)
    gone, kept = client.start(rows(1, 1)), client.start(rows(1, 2))
    lost = [vanishing.start(rows(1, 3)) for _ in range(3)]
    wait_until(lambda: server.metric("edl_teacher_queue_rows") == 5)
    gone.cancel()
    wait_until(lambda: server.metric("edl_teacher_queue_rows") == 4)
    vanishing.close()
    wait_until(lambda: server.metric("edl_teacher_queue_rows") == 1)
    computed.cancel()
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 1)
    model.gate.set()
    np.testing.assert_array_equal(outputs_of(kept.result())["logits"], logits(rows(1, 2)))
    assert [batch[:, 0].tolist() for batch in model.batches] == [[0], [2]]
    assert all(call.cancelled() or call.exception() for call in lost)
    wait_until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert server.metric("edl_teacher_requests_total", outcome="cancelled") == 5


def test_instances_compute_together(inside: StartInside, connect: Connect) -> None:
    models = [Gated(), Gated(), Gated()]
    server = inside(list(models), max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1, value)) for value in range(6)]
    wait_until(lambda: all(model.started.is_set() for model in models))
    assert client.ask("ServerLive").live, "the event loop does not wait for the models"
    assert client.ask("ServerReady").ready
    for model in models:
        model.gate.set()
    for value, call in enumerate(calls):
        np.testing.assert_array_equal(outputs_of(call.result())["logits"], logits(rows(1, value)))


def test_stop_answers_the_rest(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model, max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1)) for _ in range(3)]
    wait_until(lambda: server.metric("edl_teacher_queue_rows") == 2)
    stopping = server.begin(server.server.stop(0.1))
    for call in calls:
        assert call.exception().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    stopping.result(TIMEOUT_S)
    server.call(server.server.stop())  # may be called twice
    model.gate.set()


# The canary: a teacher whose model fails is not ready and not in discovery, until it answers again.

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
