"""Batches: over the wire to a model that waits, and one by one, where a model's faults stay with their owners."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.discovery import Registry
from edl.protocol.transport import grpc
from edl.settings import LoadSettings
from edl_serving import Array, TensorSpec
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.batching.executor import LogThrottle
from edl_serving.registration import ReadyFile, RegistrationSettings, TeacherRegistration
from edl_serving.request_error import RequestError
from tests.fast.serving.conftest import TIMEOUT_S, Connect, StartInside, outputs_of, request_bytes
from tests.fast.serving.fakes import Bench, FakeBackend, Gated, Mixed, X, five_logits, logits
from tests.waiting import wait_until


def rows(count: int, value: float = 1.0) -> Array:
    return np.full((count, 4), value, np.float32)


def test_what_never_fits_is_said(inside: StartInside, connect: Connect) -> None:
    """In place of a hint when to come again: an empty queue would have no room either, and the student ask for ever."""
    client = connect(inside(Mixed(), max_message_bytes=15_000, max_queue_bytes=15_000, max_queue_rows=200).target)
    # 200 rows of strings are 2,400 bytes in the message, and 16,400 more in memory.
    for rows, said in ((200, "15,000.*--max-queue-bytes"), (201, "has 201 rows; this server takes at most 200")):
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


FOREVER = float("inf")


def job(bench: Bench, x: Array, deadline: float = FOREVER) -> InferenceJob:
    return bench.job({"x": x}, deadline)


def failing(when: float, error: BaseException) -> Any:
    """A model that raises if a row's first element is `when`."""

    def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["x"][:, 0] == when).any():
            raise error
        return five_logits(inputs)

    return predict


@settings(max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 30))
def test_requests_get_their_own_rows(sizes: list[int], max_batch_rows: int) -> None:
    bench = Bench(FakeBackend(), max_batch_rows=max_batch_rows, max_queue_rows=1000)
    inputs = [np.random.default_rng(index).random((size, 4), np.float32) for index, size in enumerate(sizes)]
    for _ in range(2):  # the second time in buffers that were used before
        answers = bench.run(*[job(bench, x) for x in inputs])
        for x, answer in zip(inputs, answers, strict=True):
            np.testing.assert_array_equal(outputs_of(answer)["logits"], five_logits({"x": x})["logits"])
    assert max(bench.backend.calls) <= max_batch_rows
    assert sum(bench.backend.calls) == 2 * sum(sizes) == bench.metrics.rows


def test_a_model_may_answer_with_its_input() -> None:
    kept = np.zeros((2, 4), np.float32)

    def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
        kept[:] = inputs["x"]
        return {"same": inputs["x"], "kept": kept}

    spec = tuple(TensorSpec(name, "FP32", (4,)) for name in ("same", "kept"))
    bench = Bench(FakeBackend(predict, outputs=spec), max_batch_rows=2)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    whole = outputs_of(bench.run(job(bench, x))[0])
    first, second = bench.run(job(bench, x[:1]), job(bench, x[1:2]))
    bench.run(job(bench, rows(1)), job(bench, rows(1)))
    for name in ("same", "kept"):
        np.testing.assert_array_equal(whole[name], x)
        np.testing.assert_array_equal(outputs_of(first)[name], x[:1])
        np.testing.assert_array_equal(outputs_of(second)[name], x[1:2])


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration()])
def test_no_model_error_ends_the_worker(error: BaseException) -> None:
    bench = Bench(FakeBackend(failing(1.0, error)))
    (answer,) = bench.run(job(bench, rows(1)))
    assert type(error).__name__ in answer.message
    assert isinstance(bench.run(job(bench, rows(1, 2.0)))[0], bytes)


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("INTERNAL", [6, 2, 3, 1]),
        ("UNAVAILABLE", [6]),
    ],
)
def test_backend_refusals_are_not_multiplied(code: str, calls: list[int]) -> None:
    """A full engine is not asked once more for each request of a batch; who is at fault is found out."""
    error = RequestError(grpc.StatusCode[code], "no", 30_000)
    bench = Bench(FakeBackend(failing(7.0, error)))
    answers = bench.run(job(bench, rows(2)), job(bench, rows(3, 7.0)), job(bench, rows(1)))
    assert bench.backend.calls == calls
    assert answers[1] is error
    assert [answer is error for answer in answers].count(True) == (1 if len(calls) > 1 else 3)


def test_unwanted_requests_are_not_computed() -> None:
    bench = Bench(FakeBackend(failing(7.0, ValueError("seven"))))
    answers = bench.run(job(bench, rows(2), deadline=0.0), job(bench, rows(3, 7.0)))
    assert answers[0] is None, "too late to be computed once more by itself"
    assert bench.backend.calls == [5, 3]
    gone, here = job(bench, rows(2)), job(bench, rows(4))
    gone.cancelled = True
    bench.run(gone, here)
    bench.run(gone)
    assert (gone.answer, bench.backend.calls) == (None, [5, 3, 4])


def test_nan_is_an_error_of_its_owner() -> None:
    def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"logits": np.where(inputs["x"][:, :1] == 7, np.nan, 1).astype(np.float32).repeat(5, 1)}

    bench = Bench(FakeBackend(predict))
    bad = rows(3)
    bad[2, 0] = 7
    answers = bench.run(job(bench, rows(2)), job(bench, bad))
    assert isinstance(answers[0], bytes)
    assert answers[1].code.name == "INTERNAL"
    assert answers[1].message == "model 'm': output 'logits' has NaN in row 2 of 3"
    assert bench.backend.calls == [5]  # whose rows they are is known without asking again
    assert bench.metrics.faults["nan"] == 1
    infinite = Bench(FakeBackend(lambda inputs: {"logits": np.full((2, 5), -np.inf, np.float32)}))
    assert outputs_of(infinite.run(job(infinite, rows(2)))[0])["logits"][0, 0] == -np.inf
    lenient = Bench(FakeBackend(predict), check_nan=False)
    assert np.isnan(outputs_of(lenient.run(job(lenient, bad))[0])["logits"][2]).all()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (None, "returned NoneType"),
        ({}, "'logits' is missing"),
        ({"logits": [[1.0] * 5] * 2}, "'logits' is a list"),
        ({"logits": np.zeros((2, 5))}, "'logits' is float64, not float32"),
        ({"logits": np.zeros((3, 5), np.float32)}, "'logits' has shape [3, 5], not [2, 5]"),
        ({"logits": np.float32(0)}, "'logits' is a float32"),
    ],
)
def test_unpromised_outputs_are_named(output: Any, said: str) -> None:
    bench = Bench(FakeBackend(lambda inputs: output))
    (answer,) = bench.run(job(bench, rows(2)))
    assert answer.code.name == "INTERNAL"
    assert said in answer.message
    assert bench.metrics.faults["output"] == 1


def test_byte_strings_must_be_strings() -> None:
    words = TensorSpec("words", "BYTES", ())
    for found, expected in ((["é", b"\xff"], ["é".encode(), b"\xff"]), ([None, 5], None)):
        bench = Bench(FakeBackend(lambda inputs, found=found: {"words": np.array(found, object)}, outputs=(words,)))
        (answer,) = bench.run(job(bench, rows(2)))
        if expected is not None:
            assert outputs_of(answer)["words"].tolist() == expected
        else:
            assert "neither str nor bytes" in answer.message


def test_parts_of_other_shapes_are_an_error() -> None:
    def predict(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"logits": np.zeros((len(inputs["x"]), len(inputs["x"])), np.float32)}

    loose = TensorSpec("logits", "FP32", (-1,))
    bench = Bench(FakeBackend(predict, (X,), (loose,)), max_batch_rows=2)
    assert "changes its shape" in bench.run(job(bench, rows(3)))[0].message


def test_a_failing_model_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    throttle = LogThrottle(logging.getLogger("edl_serving.test"), lambda: now)
    for _ in range(1000):
        now += 0.02
        throttle.log_error("nan", "output 'logits' has NaN")
    throttle.log_error("exception", "raised ValueError", ValueError("seven"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "output 'logits' has NaN"
    assert len(lines) == 3
    assert "faults of this kind in 10 s" in lines[1]
    assert caplog.records[2].exc_info is not None
