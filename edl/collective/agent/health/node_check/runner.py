"""The node check, carried out: nodes meet in the Store, each runs a probe a round, and all read one verdict.

Keys, under a prefix that is new for each check::

    ROUND/groups          who is tested with whom, by whoever wrote it first
    ROUND/meet/NODE       where the first node of a group waits for its partners
    ROUND/result/NODE     what a node found
    verdict               by whoever wrote it first
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from edl.collective.agent.health.node_check.pairing import (
    CheckRoundResult,
    Groups,
    NodeCheckResult,
    first_groups,
    second_groups,
    summarize_rounds,
)
from edl.discovery.store import Store
from edl.errors import ProtocolError

__all__ = ["NodeCheckSettings", "check_nodes"]

_POLL_S: Final = 0.05


@dataclass(frozen=True)
class NodeCheckSettings:
    """How to check.

    Attributes:
        timeout_s: for one round of one node; the check takes at most about twice that.
        factor: how many times the median of all nodes is slow.
        raise_if_stopping: called again and again while something is waited for; may raise, to leave the check.
    """

    timeout_s: float = 60.0
    factor: float = 2.0
    raise_if_stopping: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class _Me:
    """This node in a check; `host` is where the others reach it."""

    store: Store
    prefix: str
    node: str
    host: str
    raise_if_stopping: Callable[[], object]


def check_nodes(
    store: Store, prefix: str, node: str, host: str, nodes: Sequence[str], settings: NodeCheckSettings
) -> NodeCheckResult:
    """Take part in a check as `node`. All of `nodes` must call this at about the same time, with the same list.

    Returns:
        The same verdict on every node that is there until the end.

    Raises:
        DiscoveryError: the store cannot be reached.
        ProtocolError: what others wrote makes no sense.
    """
    me = _Me(store, prefix.rstrip("/"), node, host, settings.raise_if_stopping)
    groups = _agreed(me, "1/groups", first_groups(sorted(nodes)))
    first = _round(me, 1, groups, nodes, settings)
    again = _agreed(me, "2/groups", second_groups(sorted(nodes), first, settings.factor))
    second = _round(me, 2, again, nodes, settings)
    mine = summarize_rounds(sorted(nodes), [(groups, first), (again, second)], settings.factor)
    agreed = _first(me, "verdict", asdict(mine))
    try:
        return NodeCheckResult(dict(agreed["faulty"]), dict(agreed["slow"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{me.prefix}/verdict is no verdict: {agreed!r:.100}") from exc


def _agreed(me: _Me, key: str, mine: Groups) -> Groups:
    found = _first(me, key, [list(group) for group in mine])
    try:
        return tuple(tuple(str(name) for name in group) for group in found)
    except TypeError as exc:
        raise ProtocolError(f"{me.prefix}/{key} is no list of groups: {found!r:.100}") from exc


def _first(me: _Me, key: str, mine: Any) -> Any:
    """What the first node that got here wrote."""
    key = f"{me.prefix}/{key}"
    me.store.compare_and_set(key, json.dumps(mine).encode(), None)
    entry = me.store.get(key)
    return mine if entry is None else _parsed(entry.value, key)


def _round(
    me: _Me, number: int, groups: Groups, nodes: Sequence[str], settings: NodeCheckSettings
) -> dict[str, CheckRoundResult]:
    """Do this node's part of a round, then wait for everybody's results, until the time is up."""
    deadline = time.monotonic() + settings.timeout_s
    mine = next((group for group in groups if me.node in group), (me.node,))
    result = _probe(me, f"{me.prefix}/{number}/meet/{mine[0]}", mine, deadline)
    folder = f"{me.prefix}/{number}/result/"
    me.store.put(folder + me.node, json.dumps(asdict(result)).encode())
    # A partner of ours may have waited for a silent node until its own deadline, which began a little later.
    waited = deadline + max(1.0, 0.1 * settings.timeout_s)
    results: dict[str, CheckRoundResult] = {}
    while len(results) < len(nodes):
        results = {entry.key.removeprefix(folder): _result(entry.value, entry.key) for entry in me.store.list(folder)}
        if time.monotonic() > waited:
            break
        me.raise_if_stopping()
        time.sleep(_POLL_S)
    return {node: result for node, result in results.items() if node in nodes}


def _probe(me: _Me, meet_key: str, group: Sequence[str], deadline: float) -> CheckRoundResult:
    """Run a probe to its end or the deadline, and tell the partners where to meet."""
    task: dict[str, Any] = {
        "rank": group.index(me.node),
        "world_size": len(group),
        "host": me.host,
        "port": 0,
        "timeout_s": max(1.0, deadline - time.monotonic()),
    }
    if task["rank"]:
        place = _wait_for(me, meet_key, deadline)
        if place is None:
            # Its first node is silent. What this node can do alone is still worth knowing.
            task |= {"rank": 0, "world_size": 1}
        else:
            task |= {"host": str(place["host"]), "port": int(place["port"])}
    told = _run(me, task, deadline, meet_key)
    alone = len(group) > 1 and task["world_size"] == 1
    if alone:
        told |= {"reduce_s": None, "error": f"{group[0]} did not say where to meet"}
    return _result(json.dumps(told).encode(), "a probe's words")


def _wait_for(me: _Me, key: str, deadline: float) -> Mapping[str, Any] | None:
    """The value at `key`; None if nobody wrote it in half of the time that is left."""
    until = time.monotonic() + (deadline - time.monotonic()) / 2
    while (entry := me.store.get(key)) is None:
        if time.monotonic() > until:
            return None
        me.raise_if_stopping()
        time.sleep(_POLL_S)
    place = _parsed(entry.value, key)
    if not isinstance(place, dict) or not isinstance(place.get("port"), int) or "host" not in place:
        raise ProtocolError(f"{key} is no place to meet: {place!r:.100}")
    return place


def _run(me: _Me, task: Mapping[str, Any], deadline: float, meet_key: str) -> dict[str, Any]:
    """All that the probe said; killed at the deadline. Its partners learn under `meet_key` where it waits for them."""
    command = [sys.executable, "-m", "edl.collective.agent.health.node_check.probe", json.dumps(dict(task))]
    said: dict[str, Any] = {}
    errors: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
            threading.Thread(target=_read, args=(process.stderr, errors.append), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            _listen(me, process, lines, said, deadline, meet_key)
        finally:
            late = process.poll() is None
            process.kill()
            process.wait()
            for thread in threads:
                thread.join()
    if process.returncode and "reduce_s" not in said:
        step = "meet and reduce" if "compute_s" in said else "compute"
        last = errors[-1].strip() if errors and not late else f"not done within {task['timeout_s']:.3g} s"
        said["error"] = f"could not {step}: {last}"
    return said


def _listen(
    me: _Me,
    process: subprocess.Popen[str],
    lines: queue.SimpleQueue[str],
    said: dict[str, Any],
    deadline: float,
    meet_key: str,
) -> None:
    while "reduce_s" not in said and (left := deadline - time.monotonic()) > 0:
        me.raise_if_stopping()
        try:
            words = json.loads(lines.get(timeout=min(left, _POLL_S)))
        except queue.Empty:
            if process.poll() is not None and lines.empty():
                return
            continue
        if "port" in words:
            me.store.put(meet_key, json.dumps({"host": me.host, "port": words.pop("port")}).encode())
        said |= words


def _read(pipe: Any, take: Callable[[str], object]) -> None:
    for line in pipe:
        take(line)


def _result(value: bytes, where: str) -> CheckRoundResult:
    try:
        fields = dict(_parsed(value, where))
        times = [fields.get(name) for name in ("compute_s", "reduce_s")]
        if any(isinstance(one, bool) or not isinstance(one, (int, float, type(None))) for one in times):
            raise TypeError("a time is not a number")
        return CheckRoundResult(str(fields.get("device", "cpu")), times[0], times[1], str(fields.get("error", "")))
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is no result: {value!r:.100}") from exc


def _parsed(value: bytes, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{where} is not JSON: {value!r:.100}") from exc
