"""`edl proxy` as a process: it waits for teachers, and drains."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.cli import main
from edl.testing import LocalTeacher
from tests.fast.proxy.clients import ask, check_choice, trl_request
from tests.waiting import DEADLINE_S, wait_until

MODEL = "tests.fast.distill.sequences.language_model:PrefixModel"
K = 4


class Proxy:
    """An `edl proxy` process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edl", "proxy", *arguments, "--port", "0", "--top-k", str(K), "--model", "m"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)/", line)
        assert found, line
        self.port = int(found[1])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def teacher(url: str) -> Iterator[LocalTeacher]:
    with LocalTeacher(MODEL, service="lm", discovery=url, serve={"ttl": "5m"}, wait=False) as started:
        yield started


def test_it_waits_for_a_teacher_and_drains(url: str, teacher: LocalTeacher) -> None:
    """On SIGTERM what is under way is answered, nothing new is taken, and the process ends with 0."""
    proxy = Proxy("lm", "--discovery", url, "--teacher-timeout", "90", "--drain", "90")
    with contextlib.closing(proxy), ThreadPoolExecutor(1) as client:
        first = client.submit(ask, proxy.port, trl_request([[1, 2, 3]], K, "m"))
        status, answer, _ = first.result(DEADLINE_S)
        assert status == 200, answer
        check_choice(answer["choices"][0], [1, 2, 3], K)
        assert ask(proxy.port, path="/health")[0] == 200
        wait_until(lambda: "edl_proxy_tokens_held 0.0" in ask(proxy.port, path="/metrics")[1])  # of that request
        teacher.pause()
        waiting = client.submit(ask, proxy.port, trl_request([[3, 4, 5]], K, "m"))
        held = "edl_proxy_tokens_held 16.0"  # a prompt counts as so many at least
        wait_until(lambda: held in ask(proxy.port, path="/metrics")[1])
        proxy.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ask(proxy.port, path="/health")[0] == 503)
        status, answer, headers = ask(proxy.port, trl_request([[1, 2]], K, "m"))
        assert (status, headers["Connection"]) == (503, "close"), answer
        teacher.resume()
        assert waiting.result(DEADLINE_S)[0] == 200
        assert proxy.process.wait(DEADLINE_S) == 0


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--top-k", "0"], "top_k=0"), (["--host", "192.0.2.1"], "cannot listen")):
        assert main(["proxy", "127.0.0.1:1", *arguments, "--port", "0"]) == 2
        assert words in capsys.readouterr().err
