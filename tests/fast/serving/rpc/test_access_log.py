"""Ids of requests, trace context, and what both logs make of them."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path

import pytest

from edl.errors import SettingsError
from edl.log_output import JsonFormatter
from edl_serving.messages.trace_context import request_id_of, valid_traceparent
from edl_serving.rpc.access_log import AccessLog
from tests.interrupting import deadline
from tests.waiting import DEADLINE_S, wait_until

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_ids_from_the_network_are_checked() -> None:
    assert valid_traceparent(SPAN) == SPAN
    no_ids = [f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"]
    for text in (None, b"\xff", "", "ff" + SPAN[2:], SPAN.upper(), SPAN[:-1], SPAN + "-" + "x" * 1000, *no_ids):
        assert valid_traceparent(text) == "", text
    for found, expected in (("a" * 1000, "a" * 128), (b"\xff", "b")):
        assert request_id_of({"x-request-id": found}, "b") == expected  # type: ignore[dict-item]


def test_json_lines_hold_any_message() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("edl serve"))
    logger = logging.Logger("edl_serving.x")
    logger.addHandler(handler)
    logger.warning("a %s\nb\x1b[31m", 'quote "', extra={"rows": 3, "level": "own", "path": Path("x")})
    try:
        raise ValueError("deep\ninside")
    except ValueError:
        logger.exception("failed")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    said = {"message": 'a quote "\nb\x1b[31m', "level": "warning", "logger": "edl_serving.x", "command": "edl serve"}
    assert {**said, "rows": 3, "path": "x"}.items() <= first.items()
    assert second["exception"].endswith("ValueError: deep\ninside")


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_serving.rpc.access_log._CLOSE_S", DEADLINE_S)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_access_log_may_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "m", "1")
    log.write_request(None, "OK", id="first")
    wait_until(lambda: lines_of(path))
    path.rename(tmp_path / "access.log.1")
    log.write_request(None, "OK", id="second")
    log.close()
    assert [line["id"] for line in lines_of(tmp_path / "access.log.1")] == ["first"]
    assert [line["id"] for line in lines_of(path)] == ["second"]


def test_impossible_access_logs_are_refused(tmp_path: Path) -> None:
    """To open a pipe that nobody reads would wait for a reader for ever, and SIGTERM would not end that."""
    with pytest.raises(SettingsError, match=r"nowhere.*cannot be written"):
        AccessLog(str(tmp_path / "nowhere" / "access.log"), "m", "1")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with deadline(60, "opening a pipe"), pytest.raises(SettingsError, match="nobody reads this pipe"):
        AccessLog(str(pipe), "m", "1")


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full", "m", "1")
    for _ in range(100):
        log.write_request(None, "OK", id="lost")
    log.close()
    said = [record.getMessage() for record in caplog.records if record.name == "edl_serving.rpc.access_log"]
    assert len(said) == 1, said
    assert "No space left" in said[0]


def test_a_pipe_that_hangs_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl_serving.rpc.access_log._CLOSE_S", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = AccessLog(str(path), "m", "1")
        for number in range(30_000):  # a pipe holds 64 kB, and the queue 10,000 lines
            log.write_request(None, "OK", id=number)
        log.close()
        assert any("hangs" in record.getMessage() for record in caplog.records)
    finally:
        os.set_blocking(reader, True)
        while os.read(reader, 1 << 20):  # so that its thread can end
            pass
        os.close(reader)


def test_dropped_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_serving.rpc.access_log._MOST_WAITING", 10)
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "m", "1")
    for number in range(1000):
        log.write_request(None, "OK", id=number)
    wait_until(lambda: len(lines_of(path)) >= 10)
    log.write_request(None, "OK", id="last")
    log.close()
    lines = lines_of(path)
    dropped = sum(int(str(line.get("dropped", 0))) for line in lines)
    assert dropped > 0
    assert len(lines) + dropped == 1001
