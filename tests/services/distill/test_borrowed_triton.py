"""The real Triton, whose own clients do not notice students that borrow it: in the same minute with us and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks._borrowed import (
    CONFIG,
    MAX_BATCH,
    Model,
    ask_as_its_clients,
    p99,
    start,
    student,
    undisturbed,
)
from edl.distill.transport.priority import Priority, RequestPriority
from tests.plugins_triton import TritonFactory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROUNDS = 1  # of 110 requests; `benchmarks/borrowed_triton.py` makes more
ALLOWED = 1.2


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


@pytest.mark.parametrize(
    ("model", "priority"),
    [(Model(0.04, 0.0, 1), "auto"), (Model(0.01, 0.005, 4), "lowest")],
    ids=["a batch takes its time", "each row takes its time"],
)
def test_own_clients_do_not_notice(triton: TritonFactory, model: Model, priority: Priority) -> None:
    server = start(triton, model)
    alone: list[float] = []
    beside: dict[Priority, list[float]] = {priority: [], "default": []}
    labelled: dict[Priority, int] = {priority: 0, "default": 0}
    ask_as_its_clients(server.endpoint, model, 0)
    for seed in range(ROUNDS):
        alone += ask_as_its_clients(server.endpoint, model, seed)
        for wanted, latencies in beside.items():
            with student(server.endpoint, wanted) as rows:
                before = sum(rows)
                latencies += ask_as_its_clients(server.endpoint, model, seed)
                labelled[wanted] += sum(rows) - before
    ratios = {wanted: p99(latencies) / p99(alone) for wanted, latencies in beside.items()}
    print(f"p99 alone {1000 * p99(alone):.0f} ms; beside students, by that: {ratios}; rows labelled: {labelled}")
    assert ratios[priority] <= ALLOWED
    assert ratios["default"] > 1.5, "without priority they do notice: else this test shows nothing"
    assert labelled[priority] >= ROUNDS * MAX_BATCH, "and the student got something"
    server.stop()


def test_priority_that_does_not_fit(
    triton: TritonFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model without levels, a level beyond them, and a server that is configured anew: labels come all the same."""
    quick = Model(0.002, 0.0, 1)
    server = start(triton, quick, CONFIG)
    for priority in ("auto", "lowest", 7):
        with student(server.endpoint, priority) as rows:
            assert rows[0] == MAX_BATCH
    assert "it has no priority levels: priority=7 has no effect" in caplog.text
    assert "its own clients wait behind requests of ours" in caplog.text
    server.stop()
    server = start(triton, quick)
    with student(server.endpoint, 9):
        assert "it has 2 priority levels, and priority=9 is asked for: 2 is used" in caplog.text
    # Requests whose level the server does not know, as after a restart that the connection did not notice.
    monkeypatch.setattr(
        "edl.distill.transport.client.choose_priority", lambda *args, **rest: RequestPriority(level=1_000_000)
    )
    with student(server.endpoint, "auto") as rows:
        assert rows[0] == MAX_BATCH
    server.stop()
