"""What a pod asks its node for, as the scheduler counts it."""

from __future__ import annotations

from typing import Any

import pytest

from edl.master.kube.capacity.amounts import parse_allocatable, pod_requests


def container(restart: str = "", **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}, **({"restartPolicy": restart} if restart else {})}


def test_containers_are_summed() -> None:
    spec = {"containers": [container(cpu="100m", memory="1Gi"), container(cpu="1")]}
    assert pod_requests(spec) == {"cpu": 1100, "memory": 1000 << 30, "pods": 1000}


def test_largest_init_container_counts() -> None:
    spec = {"initContainers": [container(cpu="3"), container(cpu="1")], "containers": [container(cpu="2")]}
    assert pod_requests(spec)["cpu"] == 3000
    spec["containers"] = [container(cpu="2"), container(cpu="2")]
    assert pod_requests(spec)["cpu"] == 4000


def test_sidecars_run_beside_all_later() -> None:
    """The worked example of KEP-753: a sidecar runs beside the init containers after it, and the main ones."""
    init = [container(cpu="5"), container("Always", cpu="1"), container(cpu="4.5")]
    assert pod_requests({"initContainers": init, "containers": [container(cpu="2")]})["cpu"] == 5500
    assert pod_requests({"initContainers": init, "containers": [container(cpu="6")]})["cpu"] == 7000


def test_overhead_is_added() -> None:
    spec = {"containers": [container(cpu="1")], "overhead": {"cpu": "250m", "memory": "120Mi"}}
    assert pod_requests(spec) == {"cpu": 1250, "memory": 1000 * (120 << 20), "pods": 1000}


def test_limit_is_a_request() -> None:
    spec = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "4"}, "requests": {"cpu": "1"}}}]}
    assert pod_requests(spec) == {"nvidia.com/gpu": 2000, "cpu": 1000, "pods": 1000}


def test_request_of_a_whole_pod_wins() -> None:
    spec = {"containers": [container(cpu="1", memory="1Gi")], "resources": {"requests": {"cpu": "3"}}}
    assert pod_requests(spec) == {"cpu": 3000, "memory": 1000 << 30, "pods": 1000}


def test_requests_round_up_nodes_down() -> None:
    assert pod_requests({"containers": [container(cpu="100u")]})["cpu"] == 1
    assert parse_allocatable({"cpu": "1999999u", "memory": "1.5"}) == {"cpu": 1999, "memory": 1500}


def test_empty_template_is_one_pod() -> None:
    assert pod_requests({}) == {"pods": 1000}
    assert pod_requests({"containers": [{"resources": None}], "initContainers": None}) == {"pods": 1000}


def test_nonsense_quantity_is_an_error() -> None:
    with pytest.raises(ValueError, match="much"):
        pod_requests({"containers": [container(cpu="much")]})
