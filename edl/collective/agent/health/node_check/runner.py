"""Runs a node check: nodes meet in the Store, every node runs a probe a round, and all read the same result.

Keys, under a prefix that is new for each check::

    ROUND/groups          who is tested with whom, by the node that was first
    ROUND/meet/NODE       where the first node of a group waits for its partners
    ROUND/result/NODE     what a node found
    verdict               the result, by the node that was first
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from edl.background import start_call
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
"""Between two looks into the Store. A check takes seconds; oftener, many nodes would load the Store."""
_LATE_SHARE: Final = 0.1
"""Of a round's time, at least a second, for results of nodes that began a little later: they wait for silent partners
until a deadline of their own."""


@dataclass(frozen=True)
class NodeCheckSettings:
    """How nodes are checked.

    Attributes:
        timeout_s: of a node's round, in seconds; the check takes at most about twice that.
        factor: how many times the median of all nodes is slow.
        raise_if_stopping: called again and again while something is waited for; may raise, to leave the check.
    """

    timeout_s: float = 60.0
    factor: float = 2.0
    raise_if_stopping: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class _OwnNode:
    """This node in a check.

    Attributes:
        store: shared by all nodes.
        prefix: of the check's keys, without a slash at its end.
        node: this node's id.
        host: where the others reach it.
        settings: how to check.
    """

    store: Store
    prefix: str
    node: str
    host: str
    settings: NodeCheckSettings


def check_nodes(
    store: Store, prefix: str, node: str, host: str, nodes: Sequence[str], settings: NodeCheckSettings
) -> NodeCheckResult:
    """Take part in a check. All of its nodes call this at about the same time, with the same list.

    Args:
        store: shared by all nodes.
        prefix: of the keys; new for each check.
        node: this node's id.
        host: where the others reach this node.
        nodes: the ids of all nodes in the check.
        settings: how to check.

    Returns:
        The same result on every node that is there until the end.

    Raises:
        DiscoveryError: the store cannot be reached.
        ProtocolError: what others wrote makes no sense.
    """
    own = _OwnNode(store, prefix.rstrip("/"), node, host, settings)
    groups = _agree_on_groups(own, "1/groups", first_groups(sorted(nodes)))
    first = _run_round(own, 1, groups, nodes)
    again = _agree_on_groups(own, "2/groups", second_groups(sorted(nodes), first, settings.factor))
    second = _run_round(own, 2, again, nodes)
    found = summarize_rounds(sorted(nodes), [(groups, first), (again, second)], settings.factor)
    agreed = _agree(own, "verdict", asdict(found))
    try:
        return NodeCheckResult(dict(agreed["faulty"]), dict(agreed["slow"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{own.prefix}/verdict is no verdict: {agreed!r:.100}") from exc


def _agree_on_groups(own: _OwnNode, key: str, proposed: Groups) -> Groups:
    found = _agree(own, key, [list(group) for group in proposed])
    try:
        return tuple(tuple(str(name) for name in group) for group in found)
    except TypeError as exc:
        raise ProtocolError(f"{own.prefix}/{key} is no list of groups: {found!r:.100}") from exc


def _agree(own: _OwnNode, key: str, proposed: Any) -> Any:
    """Return what the first node that got here wrote."""
    key = f"{own.prefix}/{key}"
    own.store.compare_and_set(key, json.dumps(proposed).encode(), None)
    entry = own.store.get(key)
    return proposed if entry is None else _parsed(entry.value, key)


def _run_round(own: _OwnNode, number: int, groups: Groups, nodes: Sequence[str]) -> dict[str, CheckRoundResult]:
    """Do this node's part of a round, then wait for all nodes' results, until the time is up."""
    timeout_s = own.settings.timeout_s
    deadline = time.monotonic() + timeout_s
    group = next((group for group in groups if own.node in group), (own.node,))
    result = _run_probe(own, f"{own.prefix}/{number}/meet/{group[0]}", group, deadline)
    folder = f"{own.prefix}/{number}/result/"
    own.store.put(folder + own.node, json.dumps(asdict(result)).encode())
    last_deadline = deadline + max(1.0, _LATE_SHARE * timeout_s)
    results: dict[str, CheckRoundResult] = {}
    while len(results) < len(nodes):
        results = {entry.key.removeprefix(folder): _result(entry.value, entry.key) for entry in own.store.list(folder)}
        if time.monotonic() > last_deadline:
            break
        own.settings.raise_if_stopping()
        time.sleep(_POLL_S)
    return {node: result for node, result in results.items() if node in nodes}


def _run_probe(own: _OwnNode, meet_key: str, group: Sequence[str], deadline: float) -> CheckRoundResult:
    """Run a probe to its end or the deadline, and tell the partners where to meet."""
    task: dict[str, Any] = {
        "rank": group.index(own.node),
        "world_size": len(group),
        "host": own.host,
        "port": 0,
        "timeout_s": max(1.0, deadline - time.monotonic()),
    }
    if task["rank"]:
        address = _wait_for_address(own, meet_key, deadline)
        if address is None:
            # Its first node is silent. What this node can do alone is still worth knowing.
            task |= {"rank": 0, "world_size": 1}
        else:
            task |= {"host": str(address["host"]), "port": int(address["port"])}
    reported = _run_process(own, task, deadline, meet_key)
    alone = len(group) > 1 and task["world_size"] == 1
    if alone:
        reported |= {"reduce_s": None, "error": f"{group[0]} did not say where to meet"}
    return _result(json.dumps(reported).encode(), "a probe's words")


def _wait_for_address(own: _OwnNode, key: str, deadline: float) -> Mapping[str, Any] | None:
    """Wait for the value at a key; None if it was not written in half of the time that is left."""
    until = time.monotonic() + (deadline - time.monotonic()) / 2
    while (entry := own.store.get(key)) is None:
        if time.monotonic() > until:
            return None
        own.settings.raise_if_stopping()
        time.sleep(_POLL_S)
    address = _parsed(entry.value, key)
    if not isinstance(address, dict) or not isinstance(address.get("port"), int) or "host" not in address:
        raise ProtocolError(f"{key} is no place to meet: {address!r:.100}")
    return address


def _run_process(own: _OwnNode, task: Mapping[str, Any], deadline: float, meet_key: str) -> dict[str, Any]:
    """Run the probe's process, which is killed at the deadline.

    Args:
        own: this node.
        task: of the probe.
        deadline: of `time.monotonic()`.
        meet_key: where its partners learn at which address it waits for them.

    Returns:
        All that the probe reported.
    """
    command = [sys.executable, "-m", "edl.collective.agent.health.node_check.probe", json.dumps(dict(task))]
    reported: dict[str, Any] = {}
    errors: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        readers = [
            start_call("edl-node-check-output", partial(_read_lines, process.stdout, lines.put)),
            start_call("edl-node-check-errors", partial(_read_lines, process.stderr, errors.append)),
        ]
        try:
            _follow_process(
                own, lambda: process.poll() is not None and readers[0].done(), lines, reported, deadline, meet_key
            )
        finally:
            late = process.poll() is None
            process.kill()
            process.wait()
            for reader in readers:
                reader.result()
    if process.returncode and "reduce_s" not in reported:
        step = "meet and reduce" if "compute_s" in reported else "compute"
        last = errors[-1].strip() if errors and not late else f"not done within {task['timeout_s']:.3g} s"
        reported["error"] = f"could not {step}: {last}"
    return reported


def _follow_process(
    own: _OwnNode,
    ended: Callable[[], bool],
    lines: queue.SimpleQueue[str],
    reported: dict[str, Any],
    deadline: float,
    meet_key: str,
) -> None:
    """Add what the probe prints to `reported`, until it is done, has ended and no more comes, or is late."""
    while "reduce_s" not in reported and (left_s := deadline - time.monotonic()) > 0:
        own.settings.raise_if_stopping()
        try:
            words = json.loads(lines.get(timeout=min(left_s, _POLL_S)))
        except queue.Empty:
            if ended() and lines.empty():  # in this order: the last lines come a moment after the end
                return
            continue
        if "port" in words:
            own.store.put(meet_key, json.dumps({"host": own.host, "port": words.pop("port")}).encode())
        reported |= words


def _read_lines(pipe: Any, record: Callable[[str], object]) -> None:
    for line in pipe:
        record(line)


def _result(value: bytes, where: str) -> CheckRoundResult:
    try:
        fields = dict(_parsed(value, where))
        times = [fields.get(name) for name in ("compute_s", "reduce_s")]
        if any(isinstance(value_s, bool) or not isinstance(value_s, (int, float, type(None))) for value_s in times):
            raise TypeError("a time is not a number")
        return CheckRoundResult(str(fields.get("device", "cpu")), times[0], times[1], str(fields.get("error", "")))
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is no result: {value!r:.100}") from exc


def _parsed(value: bytes, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{where} is not JSON: {value!r:.100}") from exc
