"""`edl serve` before real neighbours: a registry that is away, and PyTriton's client."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import Instance, open_registry
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


def test_teachers_join_after_an_outage(tmp_path: Path) -> None:
    """Teachers serve while discovery is away, and join when it is back."""
    agent = ConsulAgent(tmp_path / "consul")
    with LocalTeacher("echo", service="s", discovery=agent.url, wait=False, serve={"ttl": "60s"}) as teacher:
        wait_until(lambda: "discovery does not answer" in teacher.log)
        port = wait_until(lambda: re.search(r"served on 127.0.0.1:(\d+)", teacher.log))
        np.testing.assert_array_equal(ask(f"127.0.0.1:{port[1]}"), X)
        agent.start()
        try:
            teacher.wait_ready(DEADLINE_S)
            with open_registry(agent.url) as registry:
                (instance,) = wait_until(lambda: registry.snapshot("s").instances)
            assert instance.port == int(port[1])
            agent.kill()
            np.testing.assert_array_equal(ask(teacher.endpoint), X)
        finally:
            agent.kill()
        teacher.terminate()
        assert teacher.wait(DEADLINE_S) == 0
        assert "Traceback" not in teacher.log


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


def test_registry_outage_loses_nobody(consul_agent: ConsulAgent) -> None:
    """`edl teachers --watch` tells of a registry that goes away and comes back, and nobody seems to leave."""
    url = consul_agent.url
    with (
        open_registry(url) as registry,
        registry.register(Instance("watched", "one", "127.0.0.1", 8500)),  # renewed every few seconds
        watching("watched", "--discovery", url) as wait_for,
    ):
        wait_for("watched/one joined")
        consul_agent.kill()
        assert " ? watched the registry does not answer, the list is as known last" in wait_for("watched")
        consul_agent.start()
        assert " = watched the registry answers again" in wait_for("watched")
