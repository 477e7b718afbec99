"""KEDA's external scaler, asked as KEDA asks. No KEDA runs here: what it sends and reads is written down as bytes.

The bytes are those of KEDA's `externalscaler.proto` (pkg/scalers/externalscaler in kedacore/keda), and the calls those
of its `external_scaler.go`: GetMetricSpec when the object comes, then GetMetrics and IsActive at every
`pollingInterval`; StreamIsActive for `external-push`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from edl.discovery import Store
from edl.errors import SettingsError
from edl.load_reporting.wanted import wanted_key
from edl.master.external_scaler import ExternalScalerServer, ExternalScalerSettings
from edl.master.external_scaler.target import ScalerTarget
from tests.waiting import DEADLINE_S, wait_until

PATH = "/externalscaler.ExternalScaler/"
TRUE, FALSE = b"\x08\x01", b""
FAR = 1e11
"""A time that is not past: what was written then is fresh."""


def text(number: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    low, high = len(data) & 127, len(data) >> 7
    assert high < 128
    return bytes([number << 3 | 2, *([low | 128, high] if high else [low])]) + data


def reference(**metadata: str) -> bytes:
    """A ScaledObjectRef: name 1, namespace 2, scalerMetadata 3, in which KEDA's own keys are, too."""
    every = {"scalerAddress": "edl-master:9000", **metadata}
    entries = [text(3, text(1, name) + text(2, value)) for name, value in every.items()]
    return b"".join([text(1, "digits"), text(2, "labels"), *entries])


def wanted(store: Store, kind: str, name: str, count: float, **changes: object) -> None:
    record = {"v": 1, "count": count, "now": 1, "since": 1.0, "time": FAR, "reason": "r", "decisions": []}
    store.put(wanted_key(kind, name), json.dumps(record | changes).encode())  # type: ignore[arg-type]


@pytest.fixture
def channel(store: Store) -> Iterator[grpc.Channel]:
    with (
        ExternalScalerServer(store, ExternalScalerSettings()) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield channel


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"Service": "digits"},
        {"service": "digits", "job": "resnet"},
        {"service": "a/b"},
        {"job": "x" * 129},
        {"service": "digits", "maxAgeSeconds": "soon"},
        {"service": "digits", "maxAgeSeconds": "nan"},
        {"service": "digits", "maxAgeSeconds": "-1"},
    ],
)
def test_wrong_metadata_are_named(metadata: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="metadata"):
        ScalerTarget.parse(metadata)


def ask(channel: grpc.Channel, method: str, request: bytes) -> bytes:
    return bytes(channel.unary_unary(PATH + method)(request, timeout=DEADLINE_S))


def refusal(channel: grpc.Channel, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, method, request)
    return caught.value.code(), caught.value.details()


def test_wanted_replicas_as_keda_asks(store: Store, channel: grpc.Channel) -> None:
    wanted(store, "teachers", "digits", 3)
    wanted(store, "workers", "resnet", 0)
    digits, resnet = reference(service="digits"), reference(job="resnet")
    name = "edl-wanted-teachers"
    # MetricSpec: metricName 1, targetSize 2 (int64), targetSizeFloat 3 (double).
    spec = text(1, name) + b"\x10\x01" + b"\x19\0\0\0\0\0\0\xf0\x3f"
    assert ask(channel, "GetMetricSpec", digits) == text(1, spec)
    # GetMetricsRequest: scaledObjectRef 1, metricName 2. MetricValue: metricName 1, metricValue 2, metricValueFloat 3.
    value = text(1, name) + b"\x10\x03" + b"\x19\0\0\0\0\0\0\x08\x40"
    assert ask(channel, "GetMetrics", text(1, digits) + text(2, name)) == text(1, value)
    assert ask(channel, "IsActive", digits) == TRUE
    assert ask(channel, "IsActive", resnet) == FALSE
    assert ask(channel, "GetMetrics", text(1, resnet)) == text(1, text(1, "edl-wanted-workers"))
    wanted(store, "teachers", "digits", 1e18)
    assert ask(channel, "GetMetrics", text(1, digits)).startswith(text(1, b"")[:1])
    code, details = refusal(channel, "GetMetrics", text(1, digits) + text(2, "s0-other"))
    assert (code, "no metric" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert refusal(channel, "StreamMetricSpec", digits)[0] is grpc.StatusCode.UNIMPLEMENTED, "KEDA then asks itself"


def test_unknown_is_an_error_and_not_0(store: Store, channel: grpc.Channel) -> None:
    wanted(store, "teachers", "digits", 3)
    for request in (reference(service="nonesuch"), reference(job="digits")):
        code, details = refusal(channel, "IsActive", request)
        assert (code, "no advisor has written it" in details) == (grpc.StatusCode.NOT_FOUND, True)
    store.put(wanted_key("teachers", "garbage"), b"\xff{")
    assert refusal(channel, "IsActive", reference(service="garbage"))[0] is grpc.StatusCode.NOT_FOUND
    wanted(store, "teachers", "old", 3, time=1.0)
    assert ask(channel, "IsActive", reference(service="old")) == TRUE, "known last is known best"
    code, details = refusal(channel, "IsActive", reference(service="old", maxAgeSeconds="60"))
    assert (code, "maxAgeSeconds is 60" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    assert refusal(channel, "IsActive", b"\xff\xff\xff")[0] is not grpc.StatusCode.OK, "no message at all"


def test_master_serves_the_scaler(store: Store, url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "edl", "master", "advice", "--store", url, "--stay", "--scaler-port", "0"]
        process = subprocess.Popen(command, stderr=output, cwd=tmp_path)
    try:
        wait_until(lambda: "external scaler is served on port" in log.read_text(), "the scaler")
        port = int(log.read_text().partition("scaler is served on port ")[2].split()[0])
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            wanted(store, "workers", "resnet", 4)
            assert ask(channel, "IsActive", reference(job="resnet")) == TRUE
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
