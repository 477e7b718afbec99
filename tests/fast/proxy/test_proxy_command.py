"""`edl proxy` as a process before teachers that are killed, leave and come."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.testing import LocalTeacher
from tests.fast.distill.conftest import until
from tests.fast.distill.sequences.language_model import VOCABULARY
from tests.fast.proxy.clients import ask, check_choice, trl_request

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
def teachers(url: str) -> Iterator[list[LocalTeacher]]:
    serve = {"max-delay": "2ms"}
    started = [LocalTeacher(MODEL, service="lm", discovery=url, serve=serve, wait=False) for _ in range(2)]
    yield started
    for teacher in started:
        teacher.close()


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    found = Proxy("lm", "--discovery", url, "--drain", "60")
    yield found
    found.close()


def test_teachers_are_killed_and_join(proxy: Proxy, teachers: list[LocalTeacher], url: str) -> None:
    """A trainer with one URL gets each answer, exactly, though teachers are killed, drained and join."""
    for teacher in teachers:
        teacher.wait_ready()
    until(lambda: ask(proxy.port, path="/health")[0] == 200, 60)
    work: queue.Queue[int] = queue.Queue()
    for number in range(240):
        work.put(number)
    done: list[int] = []
    failures: list[Any] = []

    def trainer() -> None:
        while True:
            try:
                number = work.get_nowait()
            except queue.Empty:
                return
            random = np.random.default_rng(number)
            sequences = [random.integers(0, VOCABULARY, random.integers(1, 40)).tolist() for _ in range(3)]
            status, answer, _ = ask(proxy.port, trl_request(sequences, K, "m"))
            try:
                assert status == 200, answer
                for choice, sequence in zip(answer["choices"], sequences, strict=True):
                    check_choice(choice, sequence, K)
            except AssertionError as exc:
                failures.append(exc)
                return
            done.append(number)

    trainers = [threading.Thread(target=trainer) for _ in range(4)]
    for thread in trainers:
        thread.start()
    until(lambda: len(done) >= 40 or failures, 60)
    teachers[0].kill()
    teachers.append(LocalTeacher(MODEL, service="lm", discovery=url))
    until(lambda: len(done) >= 120 or failures, 60)
    teachers[1].terminate()
    for thread in trainers:
        thread.join(60)
    assert not failures, failures[0]
    assert sorted(done) == list(range(240))


def test_no_teacher_until_one_comes(url: str) -> None:
    found = Proxy("lm", "--discovery", url, "--teacher-timeout", "60")
    try:
        assert ask(found.port, path="/health")[0] == 503
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(ask(found.port, trl_request([[1, 2, 3]], K, "m"))))
        waiting.start()
        with LocalTeacher(MODEL, service="lm", discovery=url):
            waiting.join(90)
        assert answers
        assert answers[0][0] == 200, answers
        check_choice(answers[0][1]["choices"][0], [1, 2, 3], K)
    finally:
        found.close()


def test_sigterm_drains(proxy: Proxy, teachers: list[LocalTeacher]) -> None:
    """What is under way is answered, nothing new is taken, and the process ends with 0."""
    for teacher in teachers:
        teacher.wait_ready()
    assert ask(proxy.port, trl_request([[1, 2]], K, "m"))[0] == 200
    until(lambda: "edl_proxy_tokens_held 0.0" in ask(proxy.port, path="/metrics")[1], 60)  # of that request
    for teacher in teachers:
        os.kill(teacher.pid, signal.SIGSTOP)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(proxy.port, trl_request([[3, 4, 5]], K, "m"))))
    waiting.start()
    held = "edl_proxy_tokens_held 16.0"  # a prompt counts as so many at least
    until(lambda: held in ask(proxy.port, path="/metrics")[1], 60)
    proxy.process.send_signal(signal.SIGTERM)
    until(lambda: ask(proxy.port, path="/health")[0] == 503, 60)
    status, answer, headers = ask(proxy.port, trl_request([[1, 2]], K, "m"))
    assert (status, headers["Connection"]) == (503, "close"), answer
    for teacher in teachers:
        os.kill(teacher.pid, signal.SIGCONT)
    waiting.join(60)
    assert answers
    assert answers[0][0] == 200, answers
    assert proxy.process.wait(60) == 0


def test_wrong_usage() -> None:
    for arguments, words in ((["--top-k", "0"], "top_k=0"), (["--host", "192.0.2.1"], "cannot listen")):
        done = subprocess.run(
            [sys.executable, "-m", "edl", "proxy", "127.0.0.1:1", *arguments, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 2
        assert words in done.stderr
