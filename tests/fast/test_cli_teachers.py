"""`edl teachers` against a real registry, SQLite's: its table, JSON and `--watch`, and what users get wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from edl.cli import main
from edl.discovery import Instance, Registry, open_registry
from tests.waiting import DEADLINE_S

LONG_S = 300.0

"""Of a lease: on a busy machine nobody may renew it for some seconds."""


@contextlib.contextmanager
def watching(*arguments: str) -> Iterator[Callable[[str], str]]:
    """An `edl teachers --watch` process; waits for a line with some words."""
    command = [sys.executable, "-m", "edl", "teachers", "--watch", *arguments]
    lines: SimpleQueue[str] = SimpleQueue()
    seen: list[str] = []

    def wait_for(words: str) -> str:
        while True:
            try:
                seen.append(lines.get(timeout=DEADLINE_S))
            except Empty:
                raise AssertionError(f"no line with {words!r}: {seen}") from None
            if words in seen[-1]:
                return seen[-1]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        reading = threading.Thread(target=lambda stream: [lines.put(line) for line in stream], args=(process.stdout,))
        reading.start()
        try:
            yield wait_for
        finally:
            process.kill()
            reading.join()


def test_the_table_shows_who_is_there(registry: Registry, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    meta = {"gpu": "T4", "boot": "b2", "version": "7"}
    one = Instance("digits", "one", "127.0.0.1", 8500, model="resnet", capacity=2.0, meta=meta)
    with registry.register(one, LONG_S), registry.register(replace(one, id="two", state="draining"), LONG_S):
        assert main(["teachers", "--discovery", url]) == 0
        lines = capsys.readouterr().out.splitlines()
        (first,) = (line for line in lines if "one" in line)
        assert first.split() == ["digits", "one", "127.0.0.1:8500", "resnet", "2", "ready", "version=7", "gpu=T4"]
        assert any("draining" in line for line in lines)

        for name, words in (("others", "there are teachers of digits"), ("digts", "did you mean 'digits'?")):
            for output in ([], ["--json"]):
                assert main(["teachers", name, "--discovery", url, *output]) == 2
                assert f"no teacher of '{name}' is registered in {url}; {words}" in capsys.readouterr().err


def test_empty_registry_says_where(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_DISCOVERY", url)
    with open_registry(url):
        assert main(["teachers"]) == 0
    assert capsys.readouterr().out == f"No teacher is registered in {url}.\n"
    nowhere = f"sqlite:///{tmp_path}/nowhere/x.sqlite"
    assert main(["teachers", "--discovery", nowhere]) == 0
    assert capsys.readouterr().out == f"No teacher is registered in {nowhere}: there is no such file.\n"
    assert main(["teachers", "digits", "--discovery", nowhere]) == 2
    assert not (tmp_path / "nowhere").exists()


def test_watching_all_notices_a_new_one(registry: Registry, url: str) -> None:
    first, second = (Instance(service, "one", "127.0.0.1", 8500) for service in ("first", "second"))
    with registry.register(first, LONG_S), watching("--json", "--discovery", url) as wait_for:
        assert [service["service"] for service in json.loads(wait_for(""))["services"]] == ["first"]
        with registry.register(second, LONG_S):
            assert [service["service"] for service in json.loads(wait_for(""))["services"]] == ["first", "second"]
        assert [service["service"] for service in json.loads(wait_for(""))["services"]] == ["first"]
