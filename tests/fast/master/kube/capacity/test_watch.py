"""A `CapacityWatch` between its two threads: it knows nodes and pods, or says that it knows nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from edl.master.kube.capacity.watch import CapacityWatch
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, status
from tests.fast.master.kube.capacity.objects import node, pod
from tests.waiting import wait_until

ALL_TAKEN = [pod(node="n1"), pod(node="n1")]


class Lists:
    """Answers lists when `open` is set; watches are silent."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.refused = False

    def answer(self, request: Request) -> Reply:
        if "watch=" in request.path:
            return Reply(200, pieces=((60.0, b""),))
        assert self.open.wait(60)
        if self.refused:
            return status(403, "Forbidden", 'User "me" cannot list')
        items: list[dict[str, Any]] = [node(gpus=2)] if urlsplit(request.path).path.endswith("/nodes") else ALL_TAKEN
        return Reply(200, {"items": items, "metadata": {"resourceVersion": "10"}})


@pytest.fixture
def lists() -> Lists:
    return Lists()


@pytest.fixture
def watch(lists: Lists, tmp_path: Path) -> Iterator[CapacityWatch]:
    server = ApiServer()
    server.answer = lists.answer
    settings = KubeSettings(kubeconfig=write_kubeconfig(tmp_path / "config", server.url), timeout_s=60.0)
    try:
        with KubeClient(settings) as client, contextlib.closing(CapacityWatch(client)) as found:
            yield found
    finally:
        lists.open.set()
        server.close()


def count_idle(watch: CapacityWatch) -> int | None:
    capacity = watch.current()
    return None if capacity is None else capacity.count_fitting(pod(gpus=1))


def test_listed_is_not_taken_yet(lists: Lists, watch: CapacityWatch) -> None:
    """Pods that were listed a moment ago, and are not counted yet, must not look like idle GPUs."""
    watch._ready.clear()
    lists.open.set()
    wait_until(lambda: watch._node_watch.listed and watch._pod_watch.listed, "both lists")
    assert watch.current() is None
    assert not watch.wait_known(0.0)
    watch._ready.set()
    assert watch.wait_known(60)
    assert count_idle(watch) == 0
    assert watch.reason == ""


def test_close_wakes_who_waits(watch: CapacityWatch, lists: Lists) -> None:
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(watch.wait_known(600)))
    closing = threading.Thread(target=watch.close)
    waiting.start()
    closing.start()
    waiting.join(60)
    assert found == [False]
    lists.open.set()
    closing.join(60)


def test_refused_is_not_idle(lists: Lists, watch: CapacityWatch) -> None:
    """Without the role `edl-capacity` nothing is known, which is no zero; with it, a while later, all is."""
    lists.refused = True
    lists.open.set()
    wait_until(lambda: "nodes" in watch.reason or "pods" in watch.reason, "the reason")
    assert watch.current() is None
    lists.refused = False
    assert watch.wait_known(60)
    wait_until(lambda: watch.reason == "", "no reason")
    assert count_idle(watch) == 0
