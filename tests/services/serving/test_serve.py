"""`edl serve` before real neighbours: a Consul that is away, and PyTriton's client."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, ReaderStats
from edl.testing import LocalTeacher
from tests.fast.serving.conftest import Client, StartInside, outputs_of
from tests.fast.serving.models import Base, logits
from tests.fast.test_cli_teachers import watching
from tests.plugins_consul import ConsulAgent
from tests.waiting import DEADLINE_S, wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def ask(endpoint: str) -> np.ndarray:
    with contextlib.closing(Client(endpoint)) as client:
        return outputs_of(client.start(X).result())["y"]


def test_outage_is_reported_and_not_felt(tmp_path: Path) -> None:
    """Of a registry that is away when a teacher starts, and later under a student and `edl teachers --watch`."""
    agent = ConsulAgent(tmp_path / "consul")

    def source() -> Iterator[Any]:
        for number in itertools.count():
            yield np.full(4, number, np.float32), number

    delivered: list[Any] = []
    with LocalTeacher("echo", service="s", discovery=agent.url, wait=False, serve={"ttl": "4s"}) as teacher:
        wait_until(lambda: "discovery does not answer" in teacher.log)
        served = wait_until(lambda: re.findall(r"served on (127.0.0.1:\d+)", teacher.log))
        np.testing.assert_array_equal(ask(served[0]), X)
        agent.start()
        reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=60))
        reader.set_dynamic_teacher(agent.url, "s").set_sample_generator(source)
        try:
            teacher.wait_ready(DEADLINE_S)
            assert teacher.endpoint == served[0]
            with watching("s", "--discovery", agent.url) as wait_for, reader:
                rows = reader()

                def step(condition: Callable[[ReaderStats], object]) -> Callable[[], bool]:
                    def pull() -> bool:
                        delivered.extend(itertools.islice(rows, 20))
                        return bool(condition(reader.stats()))

                    return pull

                wait_for("joined")
                wait_until(step(lambda stats: stats.teachers_live == 1))
                agent.kill()
                wait_until(step(lambda stats: stats.discovery))
                assert reader.stats().teachers_live == 1, "the teacher last known is kept"
                assert " ? s the registry does not answer, the list is as known last" in wait_for("")
                agent.start()
                wait_until(step(lambda stats: not stats.discovery))
                assert " = s the registry answers again" in wait_for("")
                with LocalTeacher("echo", service="s", discovery=agent.url):
                    wait_until(step(lambda stats: stats.teachers_live == 2))
        finally:
            agent.kill()
        teacher.terminate()
        assert teacher.wait(DEADLINE_S) == 0
        assert "Traceback" not in teacher.log
    assert [number for _, number, _ in delivered] == list(range(len(delivered)))
    assert all(label[0] == number for _, number, label in delivered)


PYTRITON = Path(__file__).parents[3] / ".tools/triton/bin/python"
SCRIPT = """
import json, sys
import numpy as np
from pytriton.client import ModelClient
with ModelClient(f"grpc://{sys.argv[1]}", "m") as client:
    config = client.model_config
    answer = client.infer_batch(np.ones((3, 4), np.float32))
    one = client.infer_sample(np.ones(4, np.float32))
print(json.dumps([config.max_batch_size, [list(o.shape) for o in config.outputs], answer["logits"].tolist(),
                  one["logits"].tolist()]))
"""


@pytest.mark.skipif(not PYTRITON.exists(), reason="PyTriton is not installed; `make tools` fetches it")
def test_pytritons_client(inside: StartInside) -> None:
    server = inside(Base(), max_batch_rows=16)
    command = [PYTRITON, "-c", SCRIPT, server.target]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 0, run.stderr
    max_batch, shapes, batch, one = json.loads(run.stdout.splitlines()[-1])
    expected = logits(np.ones((3, 4), np.float32))
    assert (max_batch, shapes) == (16, [[5]])
    assert batch == expected.tolist()
    assert one == expected[0].tolist()
