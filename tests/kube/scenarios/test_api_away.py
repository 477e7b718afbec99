"""The API server is away while jobs run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.machine import KubeMachine
from tests.cluster.operator_process import OperatorFactory
from tests.kube.scenarios.diary import Diary, lives
from tests.kube.scenarios.scene import MEMORY, PROGRAMS, Scene
from tests.plugins_kubernetes import StoppableNodes

AWAY_S = 30.0
UNNOTICED_S = 5.0
"""A pause between two steps of 0.2 s that a busy machine may cause; a job that regroups takes no longer, but shows in
its processes."""


def test_running_job_does_not_notice(
    scene: Scene,
    stoppable_nodes: StoppableNodes,  # nobody else has an API server meanwhile
    machine: KubeMachine,
    operator: OperatorFactory,
    store: str,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """For 30 s no request is answered, to nobody in the cluster: the same processes go on, step by step."""
    shared = tmp_path / "shared"
    diary, ended = Diary(shared / "diary.jsonl"), shared / "ended"
    running = operator("--store", store)
    program = ["--nproc-per-node", "1", str(PROGRAMS / "counting.py"), str(diary.path), "--until", str(ended)]
    scene.create_job("count", program, pod_template(memory=MEMORY, writes=[shared]), minReplicas=2)
    scene.wait("two workers that train", lambda: diary.has("step", lambda step: step["world"] == 2))
    scene.wait("the phase", lambda: scene.phase("count") == "Running")
    workers = scene.running("count")

    machine.stop_api_server()
    try:
        time.sleep(AWAY_S)
    finally:
        machine.continue_api_server()
    back = time.time()
    scene.wait("training after the API server is back", lambda: diary.has("step", after=back + 10))
    assert sorted(scene.running("count")) == sorted(workers)
    assert running.running, running.text
    ended.touch()
    scene.wait_success("count")

    (end,) = diary.entries("end")
    assert end["least"] == end["most"] == end["epochs"], f"rows lost or repeated: {end}"
    assert len(lives(diary)) == 2, "workers were started again"
    assert diary.longest_pause("step") < UNNOTICED_S
