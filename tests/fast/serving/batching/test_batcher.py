"""Batches over the wire: the bounded queue, what nobody waits for, draining and the end, with a model that waits."""

from __future__ import annotations

import numpy as np
import pytest

from edl.protocol.transport import grpc
from edl_serving import Array
from tests.fast.serving.conftest import TIMEOUT_S, Connect, StartInside, outputs_of, request_bytes
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
