"""A job that wants every GPU comes while another runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.scene import Scene
from tests.kubernetes.scenarios.sharing import GPUS, Sharing, Work, share_gpus


def test_job_grows_when_another_ends(
    scene: Scene,
    gpus: Callable[[str, int], None],
    operator: OperatorFactory,
    consul_store: str,
    pod_template: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """It starts at once with what is there; the same job all or nothing waits for the end of the other.

    What that does to the GPUs' utilization is measured by `benchmarks/kube_elastic.py`.
    """
    work = Work(first=20, second=30, after_s=2.0, patient=True)
    for node in scene.cluster.nodes():
        gpus(node, GPUS // 2)
    operator("--store", consul_store, capacity=True)
    found: dict[bool, Sharing] = {}
    for elastic in (True, False):
        folder = tmp_path / f"elastic-{elastic}"
        template = pod_template(gpus=1, writes=[folder])
        found[elastic] = share_gpus(scene, template, folder, work, elastic=elastic)
        for name in ("first", "second"):
            scene.delete_job(name)
    for sharing in found.values():
        assert sorted(sharing.first.numbers) == list(range(work.first))
        assert sorted(sharing.second.numbers) == list(range(work.second))
    worlds = [world for _, world in found[True].second.workers]
    assert worlds[0] < GPUS, "it did not start with what was there"
    assert worlds[-1] == GPUS, f"it did not grow: {worlds}"
    assert {world for _, world in found[False].second.workers} == {GPUS}
    # Elastically, the first job has waited for the second's begin: that both are done says that it began beside it.
    first_end = max(end for _, end in found[False].first.units)
    assert min(begin for begin, _ in found[False].second.units) > first_end, "all or nothing does not wait?"
