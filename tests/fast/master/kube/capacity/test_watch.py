"""A `CapacityWatch` between its two threads: it knows nodes and pods, or says that it knows nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings
from edl.master.kube.capacity.watch import CapacityWatch
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request, wait_until
from tests.fast.master.kube.capacity.objects import node, pod

ALL_TAKEN = [pod(node="n1"), pod(node="n1")]


class Lists:
    """Answers lists when `open` is set; watches are silent."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def answer(self, request: Request) -> Reply:
        if "watch=" in request.path:
            return Reply(200, pieces=((60.0, b""),))
        assert self.open.wait(60)
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
    wait_until(lambda: watch._node_watch.listed and watch._pod_watch.listed)
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


class Interleaving:
    """A lock before which, once, another thread's work is done."""

    def __init__(self, lock: threading.Lock, work: Callable[[], object]) -> None:
        self._lock = lock
        self._work: Callable[[], object] | None = work

    def __enter__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_stale_watch_is_not_forgotten(lists: Lists, watch: CapacityWatch) -> None:
    """A watch that becomes stale beside an event of the other one still has its time counted."""
    lists.open.set()
    assert watch.wait_known(60)

    def lose_nodes() -> None:
        watch._node_watch._stale = "nodes: the API server is away"
        watch._note_stale()

    watch._lock = Interleaving(watch._lock, lose_nodes)  # type: ignore[assignment,arg-type]
    watch._note_alive()
    assert watch._stale_since_s is not None
