"""Runs a node check: nodes meet in the Store, each runs a probe per round, and all read the same result.

Each check has its own key prefix. The first node writes `ROUND/groups` (which nodes are tested together) and `verdict`
(the result) under the prefix. Also under the prefix are `ROUND/meet/NODE` (where the first node of a group waits for
its partners) and `ROUND/result/NODE`. Under `jobs/JOB/check/` are `waiting/NODE`, which is under a lease, and
`lists/NUMBER`, which lists the nodes of a check. A node that arrives later is in a later list. If it is alone in that
list, only its own computation is tested.

Nodes compute alone and then reduce in pairs. They do this twice, with different partners, as in DLRover's node check.
If a pair fails, at least one of its nodes is faulty. The second round pairs every suspect with a node that passed.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edl.background import start_call
from edl.collective.job_records import Record, create_once, prefix
from edl.discovery.store import Lease, Store
from edl.errors import DiscoveryError, ProtocolError

logger = logging.getLogger(__name__)


Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CheckRoundResult(Record):
    """A node's findings in one round."""

    device: str = "cpu"  # "cpu" or "cuda"; times are compared only among nodes with the same device
    compute_s: float | None = None  # seconds for the fixed work; None if it failed
    reduce_s: float | None = None  # seconds for the all-reduce with the partners; 0 without partners, None if it failed
    error: str = ""  # why something failed, as text

    @property
    def passed(self) -> bool:
        return self.compute_s is not None and self.reduce_s is not None


@dataclass(frozen=True)
class NodeCheckResult(Record):
    """The nodes that are not fit to train; all other nodes are fit."""

    faulty: dict[str, str] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)


def first_groups(nodes: Sequence[str]) -> Groups:
    """Return pairs of neighbours. If the number of nodes is odd, the last three form a group."""
    groups = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return tuple(groups)


def second_groups(nodes: Sequence[str], first: Mapping[str, CheckRoundResult], factor: float) -> Groups:
    """Pair suspects (their group failed or was slow) with passing nodes. Silent nodes without a partner work alone."""
    slow = _slow([first], factor)
    bad = [node for node in nodes if node not in slow and node in first and not first[node].passed] + list(slow)
    silent = [node for node in nodes if node not in first]
    touched = {node for group in first_groups(nodes) if {*group} & {*bad, *silent} for node in group}
    answered = bad + [node for node in nodes if node in touched and node not in bad and node not in silent]
    suspects = answered + silent
    # From the other end, since the neighbour was the partner of the first round.
    good = [node for node in nodes if node not in suspects][::-1]
    groups = list(zip(good, suspects, strict=False))
    rest = [node for node in suspects[len(good) :] if node in answered]
    half = len(rest) // 2
    groups += zip(rest[:half], rest[half : 2 * half], strict=True)
    met = {node for group in groups for node in group}
    return (*groups, *((node,) for node in nodes if node not in met))


def summarize_rounds(
    nodes: Sequence[str], rounds: Sequence[tuple[Groups, Mapping[str, CheckRoundResult]]], factor: float = 2.0
) -> NodeCheckResult:
    """Find the unfit nodes from the results of all rounds.

    A node is faulty if it passed no round, unless in one round it could compute but a partner was silent or could not
    compute. A node is slow if its best time is more than `factor` times the median for nodes with the same device.
    """
    faulty = {}
    for node in nodes:
        reasons = []
        for groups, results in rounds:
            partners = next((group for group in groups if node in group), ())
            if node in results and (results[node].passed or _explained(node, partners, results)):
                break
            reasons.append(results[node].error if node in results else "no answer")
        else:
            faulty[node] = "; ".join(dict.fromkeys(reasons))
    slow = _slow([results for _, results in rounds], factor)
    return NodeCheckResult(faulty, {node: why for node, why in slow.items() if node not in faulty})


def _explained(node: str, partners: Sequence[str], results: Mapping[str, CheckRoundResult]) -> bool:
    """Return whether a node that could compute failed to reduce because a partner was silent or unable to compute."""
    return results[node].compute_s is not None and any(
        partner not in results or results[partner].compute_s is None for partner in partners
    )


def _slow(rounds: Sequence[Mapping[str, CheckRoundResult]], factor: float) -> dict[str, str]:
    slow: dict[str, str] = {}
    for part in ("compute", "reduce"):
        best: dict[str, dict[str, float]] = {}  # by device
        for results in rounds:
            for node, result in results.items():
                seconds = result.compute_s if part == "compute" else result.reduce_s
                if seconds:
                    times = best.setdefault(result.device, {})
                    times[node] = min(seconds, times.get(node, seconds))
        for device, times in best.items():
            usual_s = statistics.median_low(times.values())  # of two the faster, or else the slower could not be slow
            for node, seconds in times.items():
                if seconds > factor * usual_s:
                    why = f"{part} on {device} took {seconds:.3g} s, the median of all nodes is {usual_s:.3g} s"
                    slow[node] = f"{slow[node]}; {why}" if node in slow else why
    return slow


_POLL_S: Final = 0.05  # between two looks into the Store; a check takes seconds, and many nodes would load the Store
_LATE_SHARE: Final = 0.1  # extra time for nodes that began later, as a share of a round's; at least a second


_KILL_TIMEOUT_S: Final = 10.0  # for a killed probe; one that hangs in the kernel longer makes this node faulty


@dataclass(frozen=True)
class NodeCheckSettings:
    """How nodes are checked."""

    timeout_s: float = 60.0  # seconds that a node's round may take; the check takes at most about twice that
    factor: float = 2.0  # how many times the median of all nodes counts as slow
    raise_if_stopping: Callable[[], object] = lambda: None  # called while waiting; may raise to leave the check


@dataclass(frozen=True)
class _OwnNode:
    """This node in a check. The check's keys begin with `prefix`."""

    store: Store
    prefix: str
    node: str
    host: str
    settings: NodeCheckSettings


def check_nodes(
    store: Store, prefix: str, node: str, host: str, nodes: Sequence[str], settings: NodeCheckSettings
) -> NodeCheckResult:
    """Take part in a check. All of the check's nodes call this at about the same time, with the same list."""
    own = _OwnNode(store, prefix.rstrip("/"), node, host, settings)
    nodes = sorted(nodes)
    groups = _agree_on_groups(own, "1/groups", first_groups(nodes))
    first = _run_round(own, 1, groups, nodes)
    again = _agree_on_groups(own, "2/groups", second_groups(nodes, first, settings.factor))
    second = _run_round(own, 2, again, nodes)
    found = summarize_rounds(nodes, [(groups, first), (again, second)], settings.factor)
    return NodeCheckResult.decode(create_once(store, f"{own.prefix}/verdict", found.encode()))


def _agree_on_groups(own: _OwnNode, key: str, proposed: Groups) -> Groups:
    key = f"{own.prefix}/{key}"
    with _translated(key):
        found = json.loads(create_once(own.store, key, json.dumps(proposed).encode()))
        return tuple(tuple(map(str, group)) for group in found)


@contextmanager
def _translated(key: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"the store's value at {key} is not part of a node check: {exc!r:.200}") from exc


def _run_round(own: _OwnNode, number: int, groups: Groups, nodes: Sequence[str]) -> dict[str, CheckRoundResult]:
    timeout_s = own.settings.timeout_s
    deadline = time.monotonic() + timeout_s
    group = next((group for group in groups if own.node in group), (own.node,))
    meet_key = f"{own.prefix}/{number}/meet/{group[0]}"
    if group[0] == own.node and len(group) > 1:
        meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # open until this round is over
        own.store.put(meet_key, json.dumps({"host": own.host, "port": meeting.port}).encode())
    result = _run_probe(own, meet_key, group, deadline)
    folder = f"{own.prefix}/{number}/result/"
    own.store.put(folder + own.node, result.encode())
    last_deadline = deadline + max(1.0, _LATE_SHARE * timeout_s)
    results: dict[str, CheckRoundResult] = {}
    while len(results) < len(nodes):
        results = {
            entry.key.removeprefix(folder): CheckRoundResult.decode(entry.value) for entry in own.store.list(folder)
        }
        if time.monotonic() > last_deadline:
            break
        own.settings.raise_if_stopping()
        time.sleep(_POLL_S)
    return {node: result for node, result in results.items() if node in nodes}


def _run_probe(own: _OwnNode, meet_key: str, group: Sequence[str], deadline: float) -> CheckRoundResult:
    """Run a probe until it ends or the deadline passes. If the group's first node is silent, this node works alone."""
    address = _wait_for_address(own, meet_key, deadline) if len(group) > 1 else None
    task: dict[str, Any] = {"world_size": 1, "timeout_s": max(1.0, deadline - time.monotonic())}
    if address is not None:
        task |= {"rank": group.index(own.node), "world_size": len(group), "host": address[0], "port": address[1]}
    reported = _run_process(task, deadline, own.settings.raise_if_stopping)
    if len(group) > 1 and address is None:
        reported |= {"reduce_s": None, "error": f"{group[0]} did not say where to meet"}
    return CheckRoundResult.from_values(reported)


def _wait_for_address(own: _OwnNode, key: str, deadline: float) -> tuple[str, int] | None:
    """Wait for the address at a key. Returns None if none is written within half of the remaining time."""
    until = time.monotonic() + (deadline - time.monotonic()) / 2
    while (entry := own.store.get(key)) is None:
        if time.monotonic() > until:
            return None
        own.settings.raise_if_stopping()
        time.sleep(_POLL_S)
    with _translated(key):
        address = json.loads(entry.value)
        return str(address["host"]), int(address["port"])


def _run_process(task: Mapping[str, Any], deadline: float, raise_if_stopping: Callable[[], object]) -> dict[str, Any]:
    command = [sys.executable, "-m", "edl.collective.agent.health.node_probe", json.dumps(dict(task))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = start_call("edl-node-probe", process.communicate)
    try:
        while not output.done() and time.monotonic() < deadline:
            raise_if_stopping()
            wait([output], _POLL_S)
    finally:
        late = not output.done()
        process.kill()
    try:
        said, errors = output.result(_KILL_TIMEOUT_S)
    except FutureTimeoutError:
        return {"error": f"the probe still hangs {_KILL_TIMEOUT_S:g} s after SIGKILL, perhaps in a driver"}
    reported: dict[str, Any] = {}
    for line in said.splitlines(keepends=True):
        if line.startswith(b"{") and line.endswith(b"\n"):  # NCCL may write lines of its own (NCCL_DEBUG)
            reported |= json.loads(line)
    if process.returncode and "reduce_s" not in reported:
        step = "meet and reduce" if "compute_s" in reported else "compute"
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        ended = last or f"the probe ended with status {process.returncode}"
        reported["error"] = f"could not {step}: " + (f"not done within {task['timeout_s']:.3g} s" if late else ended)
    return reported


_LEASE_S: Final = 10.0  # of a waiting node: with more, a check waits for dead nodes; with less, it misses busy nodes


def check_before_joining(
    store: Store, job: str, node: str, host: str, quiet_s: float, settings: NodeCheckSettings
) -> NodeCheckResult:
    """Wait for other nodes that request a check, then check all. Returns the same result on every node."""
    folder = prefix(job) + "check/"
    with store.lease(_LEASE_S) as lease:
        store.put(f"{folder}waiting/{node}", b"", lease)
        number, nodes = _find_list(store, folder, node, lease, quiet_s, settings.raise_if_stopping)
        if len(nodes) > 1:
            limit_s = 2 * settings.timeout_s
            logger.info("checking %d nodes, for %g s at most", len(nodes), limit_s, extra={"nodes": list(nodes)})
        else:
            logger.info("checking this node alone")
        return check_nodes(store, f"{folder}runs/{number}", node, host, nodes, settings)


def _find_list(
    store: Store, folder: str, node: str, lease: Lease, quiet_s: float, raise_if_stopping: Callable[[], object]
) -> tuple[int, Sequence[str]]:
    before: set[str] = set()
    since_s = time.monotonic()
    while True:
        raise_if_stopping()
        with _translated(f"{folder}lists"):
            lists = [[str(name) for name in json.loads(entry.value)] for entry in store.list(f"{folder}lists/")]
        for number, nodes in enumerate(lists):
            if node in nodes:
                return number, nodes
        if lease.lost:
            raise DiscoveryError("this node was silent while it waited to be checked: start it again")
        waiting = {entry.key.rsplit("/", 1)[1] for entry in store.list(f"{folder}waiting/")}
        waiting -= {name for nodes in lists for name in nodes}
        if waiting != before:
            before = waiting
            since_s = time.monotonic()
        elif time.monotonic() - since_s >= quiet_s and node in waiting:
            store.compare_and_set(f"{folder}lists/{len(lists):06d}", json.dumps(sorted(waiting)).encode(), None)
        time.sleep(_POLL_S)
