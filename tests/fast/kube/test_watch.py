"""Following a kind: what a watcher sees when the server answers, cuts, forgets, is silent or is away."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from edl.kube.client import KubeClient
from edl.kube.resource_types import PODS
from edl.kube.watch import KubeWatch
from tests.fast.kube.server import ApiServer, Reply, Request, status
from tests.waiting import wait_until


def pod(name: str, version: int, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "here", "resourceVersion": str(version), "labels": labels}}


def event(change: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": change, "object": obj}).encode() + b"\n"


class Script:
    """Answers lists with what is there, and the watches one after the other; then watches stay silent."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.pods = [pod("a", 1)]
        self.version = 10
        self.watches: list[Reply] = []
        self.changes: list[Callable[[], object]] = []  # after each list that is answered, before the next request
        self.asked: list[str] = []
        self.away: Reply | None = None
        server.answer = self.answer

    def answer(self, request: Request) -> Reply:
        if self.away is not None:
            return self.away
        query = parse_qs(urlsplit(request.path).query)
        if "watch" not in query:
            self.asked.append("list")
            reply = Reply(200, {"items": self.pods, "metadata": {"resourceVersion": str(self.version)}})
            if self.changes:
                self.changes.pop(0)()
            return reply
        self.asked.append(query["resourceVersion"][0])
        assert query["allowWatchBookmarks"] == ["true"]
        assert int(query["timeoutSeconds"][0]) > 0
        return self.watches.pop(0) if self.watches else Reply(200, pieces=((60.0, b""),))

    def put(self, version: int, *pods: dict[str, Any]) -> None:
        """Have these there, and no others."""
        self.pods, self.version = list(pods), version


@pytest.fixture
def script(server: ApiServer) -> Script:
    return Script(server)


@pytest.fixture
def follow(client: KubeClient, stack: ExitStack) -> Callable[..., KubeWatch]:
    return lambda **options: stack.enter_context(closing(KubeWatch(client, PODS, "here", **options)))


def names(watch: KubeWatch) -> list[str]:
    return sorted(name for _, name in watch.objects)


def test_events_change_what_is_there(script: Script, follow: Callable[..., KubeWatch]) -> None:
    pieces = event("ADDED", pod("b", 11)) + event("MODIFIED", pod("a", 12, x="y")) + event("DELETED", pod("b", 13))
    script.watches.append(Reply(200, pieces=((0.0, pieces[:30]), (0.1, pieces[30:]), (60.0, b""))))
    seen: list[tuple[str, str]] = []
    watch = follow(on_change=lambda change, obj: seen.append((change, obj["metadata"]["name"] if obj else "")))
    wait_until(lambda: len(seen) == 4)
    assert seen == [("LISTED", ""), ("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
    assert names(watch) == ["a"]
    assert watch.objects["here", "a"]["metadata"]["labels"] == {"x": "y"}
    assert watch.listed
    assert not watch.stale


def test_end_of_a_watch_is_no_outage(script: Script, follow: Callable[..., KubeWatch]) -> None:
    """The next one goes on from the last event or bookmark, and nothing is listed again."""
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "50"}})
    script.watches += [
        Reply(200, pieces=((0.0, event("ADDED", pod("b", 11))),)),
        Reply(200, pieces=((0.0, bookmark),), cut=False),
    ]
    changes: list[str] = []
    watch = follow(on_change=lambda change, obj: changes.append(change))
    wait_until(lambda: script.asked == ["list", "10", "11", "50"])
    assert changes == ["LISTED", "ADDED"]
    assert names(watch) == ["a", "b"]


@pytest.mark.parametrize("place", ["event", "status"])
def test_forgotten_version_lists_again(script: Script, follow: Callable[..., KubeWatch], place: str) -> None:
    gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
    script.watches.append(
        Reply(200, pieces=((0.0, event("ERROR", gone)),)) if place == "event" else status(410, "Expired", "too old")
    )
    script.changes.append(lambda: script.put(30, pod("c", 20)))
    watch = follow()
    wait_until(lambda: names(watch) == ["c"])
    assert not watch.stale, "it is no outage"
    wait_until(lambda: script.asked == ["list", "10", "list", "30"])


@pytest.mark.parametrize(
    "line", [b"<html>\n", b"[1]\n", b'{"type": "ADDED", "object": 3}\n', b'{"type": "ERROR", "object": {}}\n']
)
def test_garbage_is_an_outage(script: Script, follow: Callable[..., KubeWatch], line: bytes) -> None:
    script.watches.append(Reply(200, pieces=((0.0, line),)))
    changes: list[str] = []
    watch = follow(on_change=lambda change, obj: changes.append(change))
    wait_until(lambda: changes[:3] == ["LISTED", "STALE", "LISTED"])
    wait_until(lambda: not watch.stale)
    assert names(watch) == ["a"]


def test_outage_keeps_what_is_known(script: Script, follow: Callable[..., KubeWatch]) -> None:
    script.watches.append(Reply(200, pieces=((0.0, event("ADDED", pod("b", 11))),), cut=True))

    def leave(change: str, obj: object) -> None:
        if change == "ADDED":  # and the watch is not found to be cut off yet
            script.away = Reply(500, b"etcd is away")

    watch = follow(on_change=leave)
    wait_until(lambda: "etcd is away" in watch.stale)
    assert names(watch) == ["a", "b"]
    script.pods = [pod("c", 20)]
    script.away = None
    wait_until(lambda: not watch.stale)
    assert names(watch) == ["c"], "whoever reads that it answers reads what is there"


def test_first_list_may_fail(script: Script, follow: Callable[..., KubeWatch]) -> None:
    script.away = status(403, "Forbidden", 'User "me" cannot list')
    watch = follow()
    wait_until(lambda: watch.stale)
    assert not watch.listed
    assert 'verbs: ["list"]' in watch.stale
    script.away = None
    wait_until(lambda: watch.listed, "a list")


def test_silent_connection_is_noticed(
    script: Script, follow: Callable[..., KubeWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that does not end when it should is on a connection that is dead."""
    monkeypatch.setattr("edl.kube.client._WATCH_GRACE_S", -0.5)
    follow(length_s=1.3)
    wait_until(lambda: script.asked.count("list") >= 2)


def test_server_restored_from_a_backup(script: Script, follow: Callable[..., KubeWatch]) -> None:
    """Its versions went back: it knows of no change after the version that the watcher has."""
    script.watches.append(Reply(200, pieces=((0.1, b""),)))
    script.changes.append(lambda: script.put(5, pod("old", 2)))
    watch = follow()
    wait_until(lambda: names(watch) == ["old"])
    wait_until(lambda: script.asked == ["list", "10", "list", "5"])
    assert not watch.stale


@pytest.mark.parametrize("timeout_s", [0.5])
def test_answer_without_a_length(script: Script, follow: Callable[..., KubeWatch]) -> None:
    """Some proxies in between make one of it that ends with its connection. Its silence is none of an outage."""
    pieces = ((0.0, b""), (0.7, event("ADDED", pod("b", 11))), (60.0, b""))
    script.watches += [Reply(200, pieces=pieces, chunked=False)] * 100
    watch = follow()
    wait_until(lambda: names(watch) == ["a", "b"])


def test_closing_is_prompt(script: Script, follow: Callable[..., KubeWatch]) -> None:
    watch = follow()
    wait_until(lambda: watch.listed)
    wait_until(lambda: len(script.asked) == 2)
    watch.close()
    watch.close()
