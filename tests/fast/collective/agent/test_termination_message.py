"""A container's termination message: never longer than the kubelet keeps, always JSON, the telling part kept."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.termination_message import TerminationMessage, cut_traceback, write_termination_message

MEGABYTE = 1 << 20
FIRST = "rank 3: worker 1 (process 77) ended with exit code 1"


def deep_traceback(exception: str, calls: int = 20_000) -> str:
    lines = [FIRST, "Traceback (most recent call last):"]
    for number in range(calls):
        lines += [f'  File "train.py", line {number}, in descend', f"    descend({number})"]
    return "\n".join([*lines, exception])


def decode(message: TerminationMessage) -> dict[str, object]:
    data = message.encode()
    assert len(data) <= 4096
    values = json.loads(data.decode("utf-8"))
    assert isinstance(values, dict)
    return values


def test_short_text_is_kept_whole() -> None:
    message = TerminationMessage("error", 1, 3, "host-1", None, deep_traceback("ValueError: é\x00\n\t…", 3))
    assert decode(message) == {
        "cause": "error",
        "exit_code": 1,
        "rank": 3,
        "node": "host-1",
        "oom_kills": None,
        "message": message.message,
    }


def test_long_traceback_keeps_its_ends() -> None:
    text = deep_traceback("ValueError: the user's own mistake")
    assert len(text) > MEGABYTE
    found = decode(TerminationMessage("error", 1, message=text))["message"]
    assert isinstance(found, str)
    assert found.startswith(FIRST + "\n[...]\n  ")
    assert found.endswith("    descend(19999)\nValueError: the user's own mistake")
    assert found.count("descend(199") > 10, "as many calls as there is room for"


def test_exception_of_a_megabyte() -> None:
    """Where the exception's own words fill the room, its type and the end of its words are kept."""
    for words in ("x" * MEGABYTE, "a line\n" * (MEGABYTE // 7), "\x1b[0m" * (MEGABYTE // 4), "界" * MEGABYTE):
        found = decode(TerminationMessage("error", 1, message=deep_traceback(f"MyError: {words} and so on", 5)))
        text = found["message"]
        assert isinstance(text, str)
        assert f"\nMyError: {words[:100]}" in text
        assert text.startswith(FIRST)
        assert text.endswith("and so on")
        assert "descend(4)" in text, "the last call"


@settings(max_examples=30)
@given(st.text(st.characters(), max_size=3000), st.text(max_size=400), st.integers(0, 4), st.integers(0, 400))
def test_any_text_fits(text: str, node: str, times: int, max_bytes: int) -> None:
    decode(TerminationMessage("error", 255, 2**40, node, 2**62, text * times))
    cut = cut_traceback(text * times, max_bytes)
    assert len(json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")) - 2 <= max_bytes


def test_written_in_place(tmp_path: Path) -> None:
    """A container's file is a mount: it is the same file afterwards, and nothing of an older message is left."""
    path = tmp_path / "termination-log"
    path.write_text("x" * 10_000)
    number = path.stat().st_ino
    message = TerminationMessage("error", 1, 0, "host", 0, "ValueError")
    write_termination_message(str(path), message)
    assert path.read_bytes() == message.encode()
    assert path.stat().st_ino == number
    write_termination_message(os.devnull, message)
    write_termination_message("", message)


@pytest.mark.parametrize("kind", ["folder", "absent", "pipe", "full", "nul", "loop"])
def test_unwritable_log_is_only_logged(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths = {
        "folder": str(tmp_path),
        "absent": str(tmp_path / "no" / "such"),
        "pipe": str(tmp_path / "pipe"),
        "full": "/dev/full",
        "nul": "a\0b",
        "loop": str(tmp_path / "loop"),
    }
    with caplog.at_level(logging.WARNING):
        write_termination_message(paths[kind], TerminationMessage(message="x"))
    assert "EDL_TERMINATION_LOG" in caplog.text
