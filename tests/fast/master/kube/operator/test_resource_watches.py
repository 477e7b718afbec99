"""What kopf's events make the operator look at, and what their absence does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edl.kube.resource_types import ELASTIC_JOBS
from edl.master.kube.operator import resource_watches
from edl.master.kube.operator.resource_watches import ResourceWatches

KEYS = ["elasticjobs/lab/a", "elasticjobs/lab/b"]


class NoLoop:
    """Begins no watch: a test hands the events over itself."""

    def __init__(self, *args: object) -> None:
        """Begin nothing."""

    def close(self, timeout_s: float) -> None:
        """End nothing."""


@pytest.fixture
def keys() -> list[str]:
    return []


@pytest.fixture
def watches(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ResourceWatches]:
    monkeypatch.setattr(resource_watches, "BackgroundLoop", NoLoop)
    nothing: Any = None
    found = ResourceWatches(
        nothing, nothing, [ELASTIC_JOBS], ["lab"], lambda key, delay_s: keys.append(key), lambda *args: None, nothing
    )
    yield found
    found.close()


def tell_job(watches: ResourceWatches, name: str, kind: str | None = None, namespace: str = "lab") -> None:
    metadata = {"name": name, "namespace": namespace, "uid": f"u-{name}", "generation": 1}
    watches._take_resource(ELASTIC_JOBS, {"type": kind, "object": {"metadata": metadata}})


def tell_pod(watches: ResourceWatches, name: str, kind: str | None = None, job: str = "") -> None:
    labels = {"edl.io/job": job} if job else {}
    metadata = {"name": name, "namespace": "lab", "uid": f"u-{name}", "labels": labels}
    watches._take_pod({"type": kind, "object": {"metadata": metadata}})


@pytest.fixture
def known(watches: ResourceWatches, keys: list[str]) -> ResourceWatches:
    """Two jobs, each with a pod, of which all is known."""
    for name in "ab":
        tell_job(watches, name)
        tell_pod(watches, f"{name}-worker-0-0", job=name)
    tell_job(watches, "c", namespace="elsewhere")
    keys.clear()
    return watches


def test_status_alone_asks_for_no_look(known: ResourceWatches, keys: list[str]) -> None:
    tell_job(known, "a", "MODIFIED")
    assert keys == []


def test_job_that_went_between_lists(known: ResourceWatches, keys: list[str]) -> None:
    tell_job(known, "a")
    assert sorted(set(keys)) == KEYS, "b is not in the new list, and nothing else tells so"


def test_pod_made_after_the_list(watches: ResourceWatches, keys: list[str]) -> None:
    tell_job(watches, "a")
    tell_pod(watches, "a-worker-0-0", "ADDED", job="a")
    tell_job(watches, "b")
    keys.clear()
    tell_pod(watches, "a-worker-0-0", job="a")
    assert sorted(set(keys)) == KEYS
    tell_pod(watches, "a-worker-0-0", "DELETED", job="a")
    keys.clear()
    tell_pod(watches, "a-worker-0-0", job="a")
    assert keys == ["elasticjobs/lab/a"], "one that came anew is no new list"
