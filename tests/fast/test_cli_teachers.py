"""`edl teachers` against a real registry, SQLite's: lists, watches, JSON, and what users get wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from edl.cli import main
from edl.discovery import Instance, Registry, open_registry
from tests.plugins_consul import ConsulAgent


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with open_registry(url) as registry:
        yield registry


class Watching:
    """An `edl teachers --watch` process, line by line."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "edl", "teachers", "--watch", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._seen: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, words: str, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                line = self._lines.get(timeout=left)
                self._seen.append(line)
                if words in line:
                    return line
        raise AssertionError(f"no line with {words!r} within {timeout_s:g} s; seen: {self._seen}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def watching(*arguments: str) -> Iterator[Watching]:
    watch = Watching(*arguments)
    try:
        yield watch
    finally:
        watch.close()


def test_the_table_shows_who_is_there(registry: Registry, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = Instance(
        "digits",
        "one",
        "127.0.0.1",
        8500,
        model="resnet",
        capacity=2.0,
        meta={"gpu": "T4", "boot": "b2", "version": "7"},
    )
    with registry.register(one), registry.register(replace(one, id="two", state="draining")):
        assert main(["teachers", "--discovery", url]) == 0
        lines = capsys.readouterr().out.splitlines()
        (first,) = (line for line in lines if "one" in line)
        assert first.split() == ["digits", "one", "127.0.0.1:8500", "resnet", "2", "ready", "version=7", "gpu=T4"]
        assert any("draining" in line for line in lines)

        assert main(["teachers", "others", "--discovery", url]) == 0
        said = capsys.readouterr().out
        assert "No teacher of service 'others'" in said
        assert "There are teachers of 'digits'." in said


def test_empty_registry_says_where(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty registry says so and where it looked."""
    with open_registry(url):
        assert main(["teachers", "--discovery", url]) == 0
    assert capsys.readouterr().out == f"No teacher is registered in {url}.\n"
    nowhere = f"sqlite:///{tmp_path}/nowhere/x.sqlite"
    assert main(["teachers", "--discovery", nowhere]) == 0
    assert capsys.readouterr().out == f"No teacher is registered in {nowhere}: there is no such file.\n"
    assert not (tmp_path / "nowhere").exists()


def test_the_environment_names_the_registry(
    registry: Registry, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDL_DISCOVERY", url)
    with registry.register(Instance("digits", "one", "127.0.0.1", 8500)):
        assert main(["teachers"]) == 0
    assert "127.0.0.1:8500" in capsys.readouterr().out


def test_json_is_complete(registry: Registry, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with registry.register(Instance("digits", "one", "::1", 8500, tags=("gpu",), meta={"a": "b"})):
        assert main(["teachers", "--json", "--discovery", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["discovery"] == url
    (service,) = told["services"]
    (instance,) = service["instances"]
    assert (service["service"], service["stale"], service["rejected"]) == ("digits", "", [])
    assert (instance["id"], instance["endpoint"], instance["tags"]) == ("one", "[::1]:8500", ["gpu"])
    assert instance["meta"] == {"a": "b"}


def test_changes_are_printed_as_they_come(registry: Registry, url: str) -> None:
    """Joins changes and leaves are told as they come."""
    one = Instance("digits", "one", "127.0.0.1", 8500)
    with watching("digits", "--discovery", url) as watch:
        watch.wait_for("Watching service 'digits'")
        with registry.register(one) as registration:
            assert " + digits/one joined: 127.0.0.1:8500" in watch.wait_for("digits/one")
            registration.update(replace(one, state="draining"))
            assert "ready -> draining" in watch.wait_for(" ~ digits/one changed")
        watch.wait_for(" - digits/one left")


def test_watching_all_notices_a_new_one(registry: Registry, url: str) -> None:
    """Watching all services notices a new one."""
    with (
        registry.register(Instance("first", "one", "127.0.0.1", 8500)),
        watching("--json", "--discovery", url) as watch,
    ):
        told = json.loads(watch.wait_for("joined"))
        assert (told["kind"], told["service"], told["id"]) == ("joined", "first", "one")
        assert abs(told["time"] - time.time()) < 60
        with registry.register(Instance("second", "two", "127.0.0.1", 8501)):
            assert json.loads(watch.wait_for("second"))["id"] == "two"
        assert json.loads(watch.wait_for("left"))["service"] == "second"


@pytest.mark.consul
def test_registry_outage_loses_nobody(consul_agent: ConsulAgent) -> None:
    """A registry that goes away and comes back is told and nobody seems to leave."""
    with (
        open_registry(consul_agent.url) as registry,
        registry.register(Instance("watched", "one", "127.0.0.1", 8500)),
        watching("watched", "--discovery", consul_agent.url) as watch,
    ):
        watch.wait_for("watched/one joined")
        consul_agent.kill()
        assert " ? watched the registry does not answer, the list is as known last" in watch.wait_for("watched")
        consul_agent.start()
        assert " = watched the registry answers again" in watch.wait_for("watched", 60)


@pytest.mark.parametrize("url", ["nonsense", "redis://localhost", "sqlite:///dev/null/not/a/folder"])
def test_impossible_registry_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A registry that cannot be is one line."""
    assert main(["teachers", "--discovery", url]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("edl teachers: ")
    assert error.count("\n") == 1
