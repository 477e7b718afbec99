"""`edl register` with the real Triton: in discovery while it is ready, and only then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.discovery import Instance, open_registry
from edl.errors import SettingsError
from edl.testing import LocalTeacher
from edl_serving import cmd_register
from tests.plugins_consul import free_ports
from tests.plugins_triton import TritonFactory

Start = Callable[..., "subprocess.Popen[bytes]"]
QUICK = ("--interval", "100ms", "--timeout", "1s", "--ttl", "2s")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def register(url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts `edl register` in the background; its log is `register.log`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edl", "register", endpoint, "--discovery", url, *QUICK, *arguments]
        with (tmp_path / "register.log").open("ab") as log:
            started.append(
                subprocess.Popen([*command, "--exit-with", str(os.getpid())], stdin=subprocess.DEVNULL, stderr=log)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def seen(
    url: str, service: str, wanted: Callable[[tuple[Instance, ...]], bool], within_s: float = 30.0
) -> tuple[Instance, ...]:
    """The instances of `service` once they are as wanted."""
    deadline = time.monotonic() + within_s
    with open_registry(url) as registry:
        while not wanted(found := registry.snapshot(service).instances):
            assert time.monotonic() < deadline, f"not within {within_s} s: {found}"
            time.sleep(0.02)
    return found


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


@pytest.mark.triton
def test_triton_enters_leaves_and_returns(triton: TritonFactory, register: Start, url: str, tmp_path: Path) -> None:
    """A real triton enters leaves and comes back."""
    server = triton.start("sums")
    ready = tmp_path / "ready"
    process = register(
        *(server.endpoint, "--model", "sums", "--service", "labels", "--capacity", "2.5", "--tag", "gpu"),
        *("--meta", "rack=r7", "--ready-file", str(ready)),
    )
    (instance,) = seen(url, "labels", bool)
    assert (instance.endpoint, instance.model, instance.capacity) == (server.endpoint, "sums", 2.5)
    assert instance.tags == ("gpu",)
    assert instance.meta == {"rack": "r7", "version": "1"}
    until(ready.exists)

    server.stop()
    seen(url, "labels", lambda found: not found)
    until(lambda: not ready.exists())
    assert process.poll() is None

    triton.start("sums", port=server.port)
    assert seen(url, "labels", bool) == (instance,)

    process.terminate()
    assert process.wait(20) == 0
    seen(url, "labels", lambda found: not found, within_s=10.0)
    log = (tmp_path / "register.log").read_text()
    assert "out of discovery until it is ready again" in log
    assert "Traceback" not in log


@pytest.mark.triton
def test_missing_model_never_enters(triton: TritonFactory, register: Start, url: str, tmp_path: Path) -> None:
    """A model that the server lacks never enters."""
    server = triton.start("sums")
    process = register(server.endpoint, "--model", "nonesuch")
    until(lambda: "nonesuch" in (tmp_path / "register.log").read_text())
    with open_registry(url) as registry:
        assert registry.snapshot("nonesuch").instances == ()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_late_server_enters_hanging_leaves(register: Start, url: str) -> None:
    """A server that is not there yet is waited for and one that hangs leaves."""
    (port,) = free_ports(1)
    process = register(f"127.0.0.1:{port}", "--service", "s", "--model", "m", "--failures", "3")
    with open_registry(url) as registry:
        assert registry.snapshot("s").instances == ()
    with LocalTeacher("echo", port=port) as teacher:
        seen(url, "s", bool)
        teacher.pause()
        seen(url, "s", lambda found: not found)
        teacher.resume()
        (instance,) = seen(url, "s", bool)
        assert instance.endpoint == teacher.endpoint
        teacher.terminate()
        seen(url, "s", lambda found: not found)
    assert process.poll() is None


def test_announced_address_may_differ(register: Start, url: str) -> None:
    """What students are told may differ from what is asked."""
    with LocalTeacher("echo") as teacher:
        register(
            teacher.endpoint, "--model", "m", "--service", "s", "--advertise", "teachers.example:8001", "--id", "t1"
        )
        (instance,) = seen(url, "s", bool)
    assert (instance.endpoint, instance.id) == ("teachers.example:8001", "t1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["localhost", "--model", "m"], "ENDPOINT 'localhost': expected host:port"),
        (["localhost:99999", "--model", "m"], "ENDPOINT 'localhost:99999'"),
        (["localhost:1"], "name the model: --model NAME"),
        (["--model", "m"], "required: ENDPOINT"),
        (["localhost:1", "--model", "m", "--interval", "5"], "--interval '5': expected a duration with its unit"),
        (
            ["localhost:1", "--model", "m", "--intervall", "5s"],
            "unknown option '--intervall'; did you mean '--interval'?",
        ),
        (["localhost:1", "--model", "m", "--service", "a b"], "service 'a b'"),
        (["localhost:1", "--model", "m", "--discovery", "none"], "--discovery none"),
        (["localhost:1", "--model", "m", "--capacity", "-1"], "--capacity '-1': expected a number above 0"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        cmd_register.main(arguments)


def test_wrong_usage_is_one_line() -> None:
    """Wrong usage ends with one line and code 2."""
    command = [sys.executable, "-m", "edl", "register", "localhost:1", "--model", "m", "--discovery", "zookeeper://x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, done.stderr
    assert "unknown scheme 'zookeeper'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_priority_is_told_to_students(triton: TritonFactory, register: Start, url: str) -> None:
    """Whoever registers a server that others use says how students shall ask it."""
    server = triton.start()
    register(server.endpoint, "--service", "shared", "--model", server.model, "--priority", "lowest")
    with open_registry(url) as registry:
        until(
            lambda: [instance.meta.get("priority") for instance in registry.snapshot("shared").instances] == ["lowest"]
        )
