"""Announcements of a generation in a pipe: whole ones, long ones, and some that are not read."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.agent.processes.environment_pipe import EnvironmentDecoder, send_environments

PIPE_NBYTES = 4096  # what the kernel gives to a user who has many pipes


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A pipe of the smallest size, and its end as a worker opens it."""
    path = tmp_path / "control"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
    yield path, reading
    os.close(reading)


def environ(generation: int, nbytes: int = 1) -> dict[str, str]:
    return {"EDL_GENERATION": str(generation), "LONG": "x" * nbytes}


def test_announcement_larger_than_the_pipe(pipe: tuple[Path, int]) -> None:
    """Written in pieces as the worker reads, it is not taken for sent before all of it is."""
    path, reading = pipe
    decoder, found = EnvironmentDecoder(), list[dict[str, str]]()
    wanted = environ(3, 50 * PIPE_NBYTES)

    def read() -> None:
        os.set_blocking(reading, True)
        while not found:
            found.extend(decoder.feed_bytes(os.read(reading, 1000)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert send_environments({path: wanted}, timeout_s=60.0) == {path}
    thread.join(60)
    assert found == [wanted]


def test_unread_announcement_is_not_sent(pipe: tuple[Path, int]) -> None:
    """Its beginning stays in the pipe, and damages no announcement after it."""
    path, reading = pipe
    decoder = EnvironmentDecoder()
    assert send_environments({path: environ(3, 2 * PIPE_NBYTES)}, timeout_s=0.05) == set()
    assert decoder.feed_bytes(os.read(reading, 2 * PIPE_NBYTES)) == []
    assert send_environments({path: environ(4)}, timeout_s=60.0) == {path}
    assert decoder.feed_bytes(os.read(reading, 2 * PIPE_NBYTES)) == [environ(4)]


def test_a_slow_worker_keeps_no_other(pipe: tuple[Path, int], tmp_path: Path) -> None:
    slow, _ = pipe
    quick, closed, missing = tmp_path / "quick", tmp_path / "closed", tmp_path / "missing"
    os.mkfifo(quick)
    os.mkfifo(closed)
    reading = os.open(quick, os.O_RDWR | os.O_NONBLOCK)
    announcements = {slow: environ(3, 2 * PIPE_NBYTES), closed: environ(3), missing: environ(3), quick: environ(3)}
    assert send_environments(announcements, timeout_s=0.05) == {quick}
    assert EnvironmentDecoder().feed_bytes(os.read(reading, 2 * PIPE_NBYTES)) == [environ(3)]
    os.close(reading)
