"""Batches, the bounded queue, deadlines and cancelled requests, with a model whose strings the test holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.transport import grpc
from edl_serving import Array
from tests.fast.serving.conftest import Connect, StartInside, outputs_of, request_bytes, until
from tests.fast.serving.models import Base, Gated, Lookup, Mixed, Moody, logits


def rows(count: int, value: float = 1.0) -> Array:
    return np.full((count, 4), value, np.float32)


def test_gathered_requests_share_a_batch(inside: StartInside, connect: Connect) -> None:
    """Requests that gather while the model is busy share a batch."""
    model = Gated()
    server = inside(model, max_batch_rows=8)
    client = connect(server.target)
    calls = [client.start(rows(1, 0))]
    until(model.started.is_set)
    for value in range(1, 6):
        calls.append(client.start(rows(2, value)))
        until(lambda value=value: server.metric("edl_teacher_queue_rows") == 2 * value)
    assert server.metric("edl_teacher_in_flight") == 6
    model.gate.set()
    for value, call in enumerate(calls):
        expected = logits(rows(2 if value else 1, value))
        np.testing.assert_array_equal(outputs_of(call.result())["logits"], expected)
    assert [len(batch) for batch in model.batches] == [1, 8, 2]
    assert model.batches[1][:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert server.metric("edl_teacher_queue_seconds_count") == 6
    assert server.metric("edl_teacher_requests_total", outcome="ok") == 6


def test_delay_lets_requests_join(inside: StartInside, connect: Connect) -> None:
    """A delay lets requests join an idle model."""
    model = Gated()
    model.gate.set()
    server = inside(model, max_batch_rows=3, max_delay_s=30.0)
    client = connect(server.target)
    calls = [client.start(rows(1, value)) for value in range(3)]
    for call in calls:
        call.result()
    assert [len(batch) for batch in model.batches] == [3]


def test_one_shape_shares_a_batch(inside: StartInside, connect: Connect) -> None:
    """Only requests of one shape share a batch."""
    server = inside(Mixed(), max_batch_rows=2, max_delay_s=30.0)
    client = connect(server.target)
    words = np.array([[b"a", b"b"]], object)
    widths = [1, 2, 3, 3, 1, 2]
    calls = [
        client.infer_bytes.future(request_bytes({"x": np.ones((1, width), np.float32), "words": words}), timeout=20)
        for width in widths
    ]
    assert [outputs_of(call.result())["width"].tolist() for call in calls] == [[width] for width in widths]
    assert server.metric("edl_teacher_batch_rows_count") == 3


def test_large_request_is_computed_in_parts(inside: StartInside, connect: Connect) -> None:
    """A request larger than a batch is computed in parts."""
    server = inside(Base(), max_batch_rows=8, max_queue_rows=100)
    x = np.random.default_rng(0).random((100, 4), np.float32)
    np.testing.assert_array_equal(connect(server.target).infer(x)["logits"], logits(x))
    assert server.metric("edl_teacher_batch_rows_bucket", le="8.0") == server.metric("edl_teacher_batch_rows_count")
    with pytest.raises(grpc.RpcError) as refused:
        connect(server.target).infer(rows(101))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'x' has 101 rows; this server takes 100" in refused.value.details()


def test_full_queue_refuses_with_a_hint(inside: StartInside, connect: Connect) -> None:
    """A full queue refuses with a hint and takes requests again."""
    model = Gated()
    server = inside(model, max_batch_rows=4, max_queue_rows=4)
    client = connect(server.target)
    busy = client.start(rows(1))
    until(model.started.is_set)
    waiting = client.start(rows(3))
    until(lambda: server.metric("edl_teacher_queue_rows") == 3)
    with pytest.raises(grpc.RpcError) as refused:
        client.infer(rows(2))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "3 of 4 rows wait, and this request has 2" in refused.value.details()
    assert int(dict(refused.value.trailing_metadata())[names.RETRY_AFTER_MS]) > 0
    fitting = client.start(rows(1))
    until(lambda: server.metric("edl_teacher_queue_rows") == 4)
    model.gate.set()
    for call in (busy, waiting, fitting):
        call.result()
    assert len(client.infer(rows(2))["logits"]) == 2
    assert server.metric("edl_teacher_requests_total", outcome="unavailable") == 1


def test_strings_count_with_their_objects(inside: StartInside, connect: Connect) -> None:
    class Held(Mixed):
        gate = threading.Event()

        def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            self.gate.wait(30)
            return super().predict(inputs)

        def warm_up(self, max_rows: int) -> None:
            pass

    server = inside(Held(), max_batch_rows=100, max_message_bytes=15_000, max_queue_bytes=15_000)
    client = connect(server.target)
    words = np.full((100, 2), b"ab", object)  # 6 bytes each in the message, and 41 more in memory
    request = request_bytes({"x": np.ones((100, 1), np.float32), "words": words})
    first = client.infer_bytes.future(request, timeout=30)
    until(lambda: server.metric("edl_teacher_in_flight") == 1 and server.metric("edl_teacher_queue_bytes") == 0)
    held = [client.infer_bytes.future(request, timeout=30) for _ in range(2)]
    until(lambda: any(call.done() for call in held))
    Held.gate.set()
    refused = [call.exception() for call in held if call.exception() is not None]
    assert len(refused) == 1, "the queue has room for one of them"
    assert "15,000 bytes wait" in refused[0].details()
    assert first.exception() is None


def test_strings_that_never_fit_are_said(inside: StartInside, connect: Connect) -> None:
    """In place of a hint when to come again: an empty queue would have no room either, and the student ask for ever."""
    client = connect(inside(Mixed(), max_message_bytes=15_000, max_queue_bytes=15_000).target)
    words = np.full((200, 2), b"ab", object)  # 2,400 bytes in the message, and 16,400 more in memory
    request = request_bytes({"x": np.ones((200, 1), np.float32), "words": words})
    with pytest.raises(grpc.RpcError) as error:
        client.infer_bytes(request, timeout=30)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "15,000" in error.value.details()
    assert "--max-queue-bytes" in error.value.details()


def test_a_large_answer_is_no_refusal(inside: StartInside, connect: Connect) -> None:
    """A waiting request holds no answer yet: one whose answer alone fills the queue goes where nothing else waits."""
    server = inside(Base(), max_batch_rows=8, max_queue_rows=300, max_message_bytes=8192, max_queue_bytes=8192)
    x = np.random.default_rng(0).random((300, 4), np.float32)  # 6,000 bytes of logits, held whole until the last part
    client = connect(server.target)
    for _ in range(2):
        np.testing.assert_array_equal(client.infer(x)["logits"], logits(x))
    assert server.metric("edl_teacher_queue_bytes") == 0


def test_unwanted_requests_are_not_computed(inside: StartInside, connect: Connect) -> None:
    """Requests nobody waits for are not computed."""
    model = Gated()
    server = inside(model, max_batch_rows=4)
    client = connect(server.target)
    first = client.start(rows(1, 0))
    until(model.started.is_set)
    late = client.start(rows(1, 1), timeout_s=1.0)
    gone = client.start(rows(1, 2))
    kept = client.start(rows(1, 3))
    with pytest.raises(grpc.RpcError) as expired:
        late.result()
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.metric("edl_teacher_queue_rows") == 2)
    gone.cancel()
    until(lambda: server.metric("edl_teacher_queue_rows") == 1)
    model.gate.set()
    first.result()
    kept.result()
    assert [batch[:, 0].tolist() for batch in model.batches] == [[0], [3]]
    until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert server.metric("edl_teacher_requests_total", outcome="cancelled") == 2


def test_cancelled_request_harms_nobody(inside: StartInside, connect: Connect) -> None:
    """A request cancelled while it is computed harms nobody."""
    model = Gated()
    server = inside(model)
    client = connect(server.target)
    gone = client.start(rows(1))
    until(model.started.is_set)
    gone.cancel()
    until(lambda: server.metric("edl_teacher_in_flight") == 0)
    model.gate.set()
    np.testing.assert_array_equal(client.infer(rows(2, 5))["logits"], logits(rows(2, 5)))


def test_vanished_client_leaves_nothing(inside: StartInside, connect: Connect) -> None:
    """A client that vanishes leaves nothing in flight."""
    model = Gated()
    server = inside(model, max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1)) for _ in range(5)]
    until(lambda: server.metric("edl_teacher_in_flight") == 5)
    client.close()
    until(lambda: server.metric("edl_teacher_in_flight") == 0)
    assert server.metric("edl_teacher_queue_rows") == 0
    model.gate.set()
    assert all(call.cancelled() or call.exception() for call in calls)


def test_instances_compute_together(inside: StartInside, connect: Connect) -> None:
    """Several instances compute at the same time."""
    models = [Gated(), Gated(), Gated()]
    server = inside(list(models), max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1, value)) for value in range(6)]
    until(lambda: all(model.started.is_set() for model in models))
    for model in models:
        model.gate.set()
    for value, call in enumerate(calls):
        np.testing.assert_array_equal(outputs_of(call.result())["logits"], logits(rows(1, value)))


def test_inline_model_answers_on_the_loop(inside: StartInside, connect: Connect) -> None:
    """An inline model answers on the event loop."""
    server = inside(Lookup(), max_batch_rows=8)
    x = np.random.default_rng(0).random((20, 4), np.float32)
    np.testing.assert_array_equal(connect(server.target).infer(x)["logits"], logits(x))


def test_stop_answers_the_rest(inside: StartInside, connect: Connect) -> None:
    """Stopping answers what is left and closes the models."""
    model = Gated()
    server = inside(model, max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1)) for _ in range(3)]
    until(lambda: server.metric("edl_teacher_queue_rows") == 2)
    stopping = server.begin(server.server.stop(0.1))
    for call in calls:
        assert call.exception(timeout=10).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    stopping.result(10)
    model.gate.set()


def test_server_starts_and_stops_repeatedly(inside: StartInside, connect: Connect) -> None:
    """A server can be started and stopped again and again."""
    for _ in range(3):
        server = inside(Base(), metrics_port=0)
        assert len(connect(server.target).infer(rows(2))["logits"]) == 2
        server.call(server.server.stop())
        server.call(server.server.stop())


def test_backends_close_after_failed_start(inside: StartInside) -> None:
    """Backends are closed even if the server could not start."""

    class Closing(Base):
        closed = False

        def close(self) -> None:
            self.closed = True

    first, second = Closing(), Closing()
    server = inside(first)
    with pytest.raises(SettingsError, match=str(server.port)):
        inside(second, port=server.port)
    assert second.closed
    assert not first.closed
    server.call(server.server.stop())
    assert first.closed


def test_drain_finishes_accepted_requests(inside: StartInside, connect: Connect) -> None:
    """Drain finishes what was accepted and refuses the rest."""
    model = Gated()
    server = inside(model, max_batch_rows=1)
    client = connect(server.target)
    calls = [client.start(rows(1, value)) for value in range(3)]
    until(lambda: server.metric("edl_teacher_in_flight") == 3)
    draining = server.begin(server.server.drain(20.0))
    until(lambda: not server.server.ready)
    with pytest.raises(grpc.RpcError) as refused:
        client.infer(rows(1))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in refused.value.details()
    assert names.RETRY_AFTER_MS not in dict(refused.value.trailing_metadata())  # so: elsewhere
    assert not draining.done()
    model.gate.set()
    assert draining.result(20)
    for value, call in enumerate(calls):
        np.testing.assert_array_equal(outputs_of(call.result())["logits"], logits(rows(1, value)))


def test_drain_gives_up_at_its_deadline(inside: StartInside, connect: Connect) -> None:
    model = Gated()
    server = inside(model)
    call = connect(server.target).start(rows(1))
    until(model.started.is_set)
    assert not server.call(server.server.drain(0.05))
    model.gate.set()
    call.result()


def test_failing_model_serves_on(inside: StartInside, connect: Connect) -> None:
    """A model that fails is told on and serves on."""
    server = inside(Moody(), max_batch_rows=16, max_delay_s=0.2)
    client = connect(server.target)
    calls = {value: client.start(rows(2, value)) for value in (0, 1, 2, 3, 5)}
    for value in (0, 5):
        np.testing.assert_array_equal(outputs_of(calls[value].result())["logits"], logits(rows(2, value)))
    for value, said in ((1, "ValueError: in a bad mood"), (2, "'logits' has NaN in row 0 of 2"), (3, "shape [1, 5]")):
        error = calls[value].exception()
        assert error.code() is grpc.StatusCode.INTERNAL
        assert said in error.details()
        assert "Traceback" not in error.details()
    assert len(client.infer(rows(1, 0))["logits"]) == 1


def test_event_loop_never_waits(inside: StartInside, connect: Connect) -> None:
    """The event loop never waits for the model."""
    model = Gated()
    server = inside(model)
    client = connect(server.target)
    call = client.start(rows(1))
    until(model.started.is_set)
    server.call(asyncio.sleep(0))
    assert client.ask("ServerLive").live
    assert client.ask("ServerReady").ready
    model.gate.set()
    call.result()
