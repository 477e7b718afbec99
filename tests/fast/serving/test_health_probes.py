"""`/livez` and `/readyz` of a real `edl serve`, as a kubelet asks them."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.testing import LocalTeacher
from tests.fast.test_serve_command import ask, being_computed

GATED_ECHO = "tests.fast.serving.models:gated_echo"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def probe(teacher: LocalTeacher, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, TimeoutError) as error:
        return 0, str(error)


def until(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_ready_until_it_drains(tmp_path: Path) -> None:
    url, gate = f"sqlite://{tmp_path / 'discovery.db'}", tmp_path / "gate"
    serve = {"metrics-port": 0}
    with LocalTeacher(GATED_ECHO, service="s", discovery=url, serve=serve, gate=str(gate)) as teacher:
        ready = 200, "[+]discovery ok\n[+]model ok\n[+]registry ok\nreadyz check passed\n"
        assert probe(teacher, "/readyz") == ready
        assert probe(teacher, "/livez")[0] == 200
        with being_computed(teacher) as answers:
            teacher.terminate()
            until(lambda: (found := probe(teacher, "/readyz"))[0] == 503 and "[-]model failed: draining" in found[1])
            assert probe(teacher, "/livez")[0] == 200, "a teacher that drains is not to be killed"
            gate.touch()
        np.testing.assert_array_equal(answers, [X])
        assert teacher.wait(20) == 0


def test_not_live_while_the_model_hangs(tmp_path: Path) -> None:
    serve, gate = {"metrics-port": 0, "stall-timeout": "1s"}, tmp_path / "gate"
    with LocalTeacher(GATED_ECHO, serve=serve, gate=str(gate)) as teacher:
        assert probe(teacher, "/livez")[0] == 200
        asking = threading.Thread(target=ask, args=(teacher.endpoint, X))
        asking.start()
        _, text = until(lambda: (found := probe(teacher, "/livez"))[0] == 503 and found)
        assert "[-]model failed: a call of the model takes" in text
        gate.touch()
        asking.join(30)
        until(lambda: probe(teacher, "/livez")[0] == 200)


def test_stopped_process_does_not_answer() -> None:
    """A kubelet's probe runs into its own timeout: nothing answers for a process that gets no time."""
    with LocalTeacher("echo", serve={"metrics-port": 0}) as teacher:
        os.kill(teacher.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/livez", timeout=1)
        finally:
            os.kill(teacher.pid, signal.SIGCONT)
        assert until(lambda: probe(teacher, "/livez")[0] == 200)
