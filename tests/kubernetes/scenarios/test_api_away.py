"""The API server is away while jobs run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.machine import KubeMachine
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.diary import Diary, lives
from tests.kubernetes.scenarios.scene import MEMORY, PROGRAMS, Scene
from tests.plugins_kubernetes import StoppableNodes

AWAY_S = 30.0
UNNOTICED_S = AWAY_S / 2
"""A job that waited for the API server would do nothing for all that time; a pause of some seconds between two steps of
0.2 s may come from a busy machine."""


def test_running_jobs_do_not_notice(
    scene: Scene,
    stoppable_nodes: StoppableNodes,  # nobody else has an API server meanwhile
    machine: KubeMachine,
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """For 30 s no request is answered, to nobody in the cluster: the same processes go on, step by step.

    So do those of a job whose store is the API server itself.
    """
    stores = {"with-consul": consul_store, "with-kubernetes": f"kubernetes://{scene.namespace}"}
    running = operator("--store", consul_store)
    shared = {name: tmp_path / name for name in stores}
    diaries = {name: Diary(folder / "diary.jsonl") for name, folder in shared.items()}
    for name, store in stores.items():
        program = [str(PROGRAMS / "counting.py"), str(diaries[name].path), "--until", str(shared[name] / "ended")]
        template = pod_template(memory=MEMORY, writes=[shared[name]])
        scene.create_job(name, ["--nproc-per-node", "1", *program], template, minReplicas=2, store=store)
    for name, diary in diaries.items():
        scene.wait(f"two workers of {name}", lambda diary=diary: diary.has("step", lambda step: step["world"] == 2))  # type: ignore[misc]
        scene.wait("the phase", lambda name=name: scene.phase(name) == "Running")  # type: ignore[misc]
    workers = {name: scene.wait_running(name, 2) for name in stores}

    machine.stop_api_server()
    try:
        time.sleep(AWAY_S)
    finally:
        machine.continue_api_server()
    back = time.time()
    for name, diary in diaries.items():
        scene.wait(f"training of {name} afterwards", lambda diary=diary: diary.has("step", after=back + 10))  # type: ignore[misc]
        assert sorted(scene.running(name)) == workers[name]
    assert running.running, running.text
    for folder in shared.values():
        (folder / "ended").touch()
    for name, diary in diaries.items():
        scene.wait_success(name)
        (end,) = diary.entries("end")
        assert end["least"] == end["most"] == end["epochs"], f"rows lost or repeated: {end}"
        assert len(lives(diary)) == 2, f"workers of {name} were started again"
        assert diary.longest_pause("step") < UNNOTICED_S
