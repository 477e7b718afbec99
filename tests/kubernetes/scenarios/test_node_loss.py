"""A node is lost while a job runs on it, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.diary import Diary, index_of, lives, overlaps
from tests.kubernetes.scenarios.scene import MEMORY, PROGRAMS, Scene, is_running, node_of
from tests.plugins_kubernetes import StoppableNodes

LOST_S = 240.0
"""Until a pod on a lost node is replaced: 8 s until the node counts as lost, 30 s of toleration, and a start."""


def test_job_goes_on_without_its_node(
    scene: Scene,
    gpus: Callable[[str, int], None],
    stoppable_nodes: StoppableNodes,
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """It shrinks to what is left, grows on the other node, and when the node is back nothing runs twice."""
    home, other = scene.cluster.nodes()
    shared = tmp_path / "shared"
    template = pod_template(gpus=1, memory=MEMORY, writes=[shared])
    diary, ended = Diary(shared / "diary.jsonl"), shared / "ended"
    gpus(home, 1)
    gpus(other, 1)
    operator("--store", consul_store)
    program = ["--nproc-per-node", "1", str(PROGRAMS / "counting.py"), str(diary.path), "--until", str(ended)]
    scene.create_job("count", program, template, minReplicas=1, maxReplicas=2)
    scene.wait("two workers that train", lambda: diary.has("step", lambda step: step["world"] == 2))
    scene.wait_running("count", 2)
    (lost,) = (pod["metadata"]["name"] for pod in scene.pods("count") if node_of(pod) == other and is_running(pod))
    gpus(home, 2)  # room for its successor

    stoppable_nodes.stop(other)
    stopped = time.time()
    alone = scene.wait(
        "training by the worker that is left",
        lambda: [step["at"] for step in diary.entries("step", after=stopped) if step["world"] == 1],
    )
    # Not after `stopped`: of a step that both had computed by then, the one that is left writes a moment later.
    scene.wait(
        "training with a worker in place of the lost one",
        lambda: diary.has("step", lambda step: step["world"] == 2, after=alone[0]),
        LOST_S,
    )

    def find_successor() -> list[Any]:
        running = [pod for pod in scene.pods("count") if is_running(pod)]
        names = {pod["metadata"]["name"]: pod for pod in running}
        return [pod for name, pod in names.items() if index_of(name) == index_of(lost) and name != lost]

    (successor,) = scene.wait("its pod", find_successor)
    assert node_of(successor) == home
    stoppable_nodes.start(other)
    scene.wait("the end of the lost pod", lambda: lost not in [pod["metadata"]["name"] for pod in scene.pods("count")])
    back = time.time()
    scene.wait("training after the node is back", lambda: diary.has("step", lambda step: step["world"] == 2, back + 5))
    ended.touch()
    scene.wait_success("count")

    (end,) = diary.entries("end")
    assert end["least"] == end["most"] == end["epochs"], f"rows lost or repeated: {end}"
    assert overlaps(lives(diary)) == [], "two processes of a member were alive at the same time"
    late = [entry for entry in diary.entries(after=stopped + 1) if entry["pod"] == lost]
    assert late == [], "what ran on the lost node went on"
    names = sorted(pod["metadata"]["name"] for pod in scene.pods("count"))
    assert len({index_of(name) for name in names}) == 2, names
