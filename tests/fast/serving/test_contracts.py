"""What a model and the settings must be before a server starts, and what the package offers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import edl_serving
from edl.errors import SettingsError
from edl.protocol import kserve
from edl_serving import ServerSettings, TeacherServer, TensorSpec
from edl_serving.monitoring.log_throttle import LogThrottle
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import RequestError, invalid_argument, quote
from tests.fast.serving.fakes import LOGITS, FakeBackend, X, model_of


def test_the_public_names_are_these() -> None:
    assert edl_serving.__all__ == [
        "Array",
        "Backend",
        "ServerSettings",
        "TeacherServer",
        "TensorSpec",
        "TopKArrays",
        "serve",
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": ""}, "model=''"),
        ({"max_batch_rows": 0}, "max_batch_rows=0"),
        ({"max_batch_rows": 65, "max_queue_rows": 64}, "max_queue_rows=64"),
        ({"max_delay_s": -1.0}, "max_delay_s=-1.0"),
        ({"max_delay_s": float("nan")}, "max_delay_s=nan"),
        ({"port": 65536}, "port=65536"),
        ({"metrics_port": -1}, "metrics_port=-1"),
        ({"max_message_bytes": 2**31}, f"max_message_bytes={2**31}"),
        ({"drain_timeout_s": -0.1}, "drain_timeout_s=-0.1"),
    ],
)
def test_impossible_settings_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        ServerSettings(**{"model": "m", **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("", "FP32"), "name"),
        (("x", "FLOAT"), "'x'.*'FLOAT'"),
        (("x", "FP32", (0,)), "'x'.*size of 0"),
        (("x", "FP32", (3, -2)), "'x'.*size of -2"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(values: tuple[Any, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TensorSpec(*values)


@pytest.mark.parametrize(
    ("backends", "said"),
    [
        ([], "at least one"),
        ([FakeBackend(), FakeBackend(outputs=(X,))], "differ"),
        ([FakeBackend(inputs=())], "no inputs"),
        ([FakeBackend(outputs=())], "no outputs"),
        ([FakeBackend(inputs=(X, X))], "two inputs"),
        ([FakeBackend(outputs=(TensorSpec("y", "BF16"),))], "'y' is BF16"),
    ],
)
def test_unservable_backends_are_refused(backends: list[FakeBackend], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TeacherServer(ServerSettings(model="m"), backends)


def test_warm_up_has_one_row_and_a_batch() -> None:
    seen = []

    def predict(inputs: Any) -> dict[str, Any]:
        seen.append({name: (array.shape, array.dtype) for name, array in inputs.items()})
        return {"logits": np.zeros((len(inputs["x"]), 5), np.float32)}

    words = TensorSpec("words", "BYTES", (-1, 2))
    FakeBackend(predict, inputs=(X, words)).warm_up(16)
    assert sorted(shapes["x"][0] for shapes in seen) == [(1, 4), (16, 4)]
    assert sorted(shapes["words"] for shapes in seen)[0] == ((1, 1, 2), np.dtype(object))


def test_metadata_and_configuration() -> None:
    model = model_of(FakeBackend(inputs=(TensorSpec("words", "BYTES", ()), X)), max_batch_rows=7, max_delay_s=0.001)
    metadata, config = model.metadata(), model.config().config
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        ("words", "BYTES", [-1]),
        ("x", "FP32", [-1, 4]),
    ]
    assert [list(one.shape) for one in metadata.outputs] == [[-1, *LOGITS.shape]]
    assert [(one.data_type, list(one.dims)) for one in config.input] == [
        (kserve.TYPE_STRING, []),
        (kserve.TYPE_FP32, [4]),
    ]
    assert (config.max_batch_size, config.dynamic_batching.max_queue_delay_microseconds) == (7, 1000)


def test_an_unknown_version_is_not_listed() -> None:
    backend = FakeBackend()
    backend.version_if_unnamed = ""
    model = model_of(backend)
    assert list(model.metadata().versions) == []
    model.check_request("m", "")
    with pytest.raises(RequestError, match="and none that is known"):
        model.check_request("m", "1")


def test_quotes_are_short_and_printable() -> None:
    assert quote("a\nb") == "'a\\nb'"
    assert len(quote("x" * 10**6)) < 200
    assert len(quote(list(range(1000)))) < 200
    refusal = invalid_argument("y" * 10**5)
    assert len(refusal.message) < 1100
    assert refusal.trailing_metadata == ()
    assert RequestError(refusal.code, "full", retry_after_ms=20).trailing_metadata == (
        ("grpc-retry-pushback-ms", "20"),
    )


def test_metrics_add_up_over_workers() -> None:
    metrics = Metrics("m")
    for rows in (3, 64):
        worker = metrics.add_worker()
        worker.record_batch(rows, 0.003)
        worker.record_queue_time(0.0001)
    worker.record_fault("nan")
    metrics.record_outcome("ok")
    metrics.add_gauge("edl_teacher_in_flight", "Requests not answered yet.", lambda: 5)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m", **labels})

    assert value("edl_teacher_rows_total") == 67
    assert value("edl_teacher_batch_rows_bucket", le="4.0") == 1
    assert value("edl_teacher_batch_rows_bucket", le="64.0") == value("edl_teacher_batch_rows_count") == 2
    assert value("edl_teacher_compute_seconds_sum") == pytest.approx(0.006)
    assert value("edl_teacher_queue_seconds_bucket", le="0.0005") == 2
    assert value("edl_teacher_model_faults_total", kind="nan") == 1
    assert value("edl_teacher_requests_total", outcome="ok") == 1
    assert value("edl_teacher_in_flight") == 5


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


def test_limits_follow_the_largest_message() -> None:
    large = ServerSettings(model="m", max_message_bytes=2**31 - 1)
    assert large.max_queue_bytes == large.max_client_bytes == 2 * (2**31 - 1), "two of them have room"
    assert ServerSettings(model="m").max_queue_bytes == 1 << 30
    with pytest.raises(SettingsError, match=r"must hold a message.*--max-client-bytes, --max-message"):
        ServerSettings(model="m", max_client_bytes=1 << 20)
