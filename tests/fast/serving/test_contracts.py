"""What a model and the settings must be before a server starts, and what the package offers."""

from __future__ import annotations

from typing import Any

import pytest

from edl.errors import SettingsError
from edl_serving import ServerSettings, TeacherServer, TensorSpec
from edl_serving.request_error import RequestError, invalid_argument, quote
from tests.fast.serving.fakes import FakeBackend, X, model_of


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": ""}, "model=''"),
        ({"max_batch_rows": 0}, "max_batch_rows=0"),
        ({"max_batch_rows": 65, "max_queue_rows": 64}, "max_queue_rows=64"),
        ({"max_delay_s": -1.0}, "max_delay_s=-1.0"),
        ({"port": 65536}, "port=65536"),
        ({"max_message_bytes": 2**31}, f"max_message_bytes={2**31}"),
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


def test_limits_follow_the_largest_message() -> None:
    large = ServerSettings(model="m", max_message_bytes=2**31 - 1)
    assert large.max_queue_bytes == large.max_client_bytes == 2 * (2**31 - 1), "two of them have room"
    assert ServerSettings(model="m").max_queue_bytes == 1 << 30
    with pytest.raises(SettingsError, match=r"must hold a message.*--max-client-bytes, --max-message"):
        ServerSettings(model="m", max_client_bytes=1 << 20)
