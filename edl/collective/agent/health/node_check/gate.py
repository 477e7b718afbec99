"""The node check before a node joins: nodes that wait agree on a list, and test one another.

Keys under `jobs/JOB/check/`: `waiting/NODE`, under a lease, and `lists/NUMBER`, the nodes of a check, by the node that
was first. A node that comes later is in a later list; in a running job it may be alone in it, and then only its own
computing is tested.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from edl.collective.agent.health.node_check.pairing import NodeCheckResult
from edl.collective.agent.health.node_check.runner import NodeCheckSettings, check_nodes
from edl.collective.job_records import prefix
from edl.discovery.store import Lease, Store
from edl.errors import DiscoveryError, ProtocolError

__all__ = ["check_before_joining"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.05
"""Between two looks at who waits: nodes that come together are to be checked together, within the time they wait."""
_LEASE_S: Final = 10.0
"""Of a node that waits. With more, a check counts longer on a node that died; with less, a busy node misses its own."""


def check_before_joining(
    store: Store, job: str, node: str, host: str, quiet_s: float, settings: NodeCheckSettings
) -> NodeCheckResult:
    """Wait for other nodes that want to be checked, then check all of them.

    Args:
        store: shared by all nodes.
        job: its name.
        node: this node's id.
        host: where the others reach this node.
        quiet_s: how long to wait after the last node came, in seconds.
        settings: how to check.

    Returns:
        The nodes that are not fit, the same on every node of the check.

    Raises:
        DiscoveryError: the store cannot be reached.
        ProtocolError: what others wrote makes no sense.
    """
    folder = prefix(job) + "check/"
    with store.lease(_LEASE_S) as lease:
        store.put(f"{folder}waiting/{node}", b"", lease)
        number, nodes = _find_list(store, folder, node, lease, quiet_s, settings.raise_if_stopping)
        if len(nodes) > 1:
            limit_s = 2 * settings.timeout_s
            logger.info("checking %d nodes, for %g s at most", len(nodes), limit_s, extra={"nodes": list(nodes)})
        else:
            logger.info("checking itself")
        return check_nodes(store, f"{folder}runs/{number}", node, host, nodes, settings)


def _find_list(
    store: Store, folder: str, node: str, lease: Lease, quiet_s: float, raise_if_stopping: Callable[[], object]
) -> tuple[int, Sequence[str]]:
    """Wait for the list that this node is in. Returns its number and its nodes."""
    before: set[str] = set()
    since_s = time.monotonic()
    while True:
        raise_if_stopping()
        lists = [_names(entry.value) for entry in store.list(f"{folder}lists/")]
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


def _names(value: bytes) -> list[str]:
    try:
        return [str(name) for name in json.loads(value)]
    except (ValueError, TypeError) as exc:
        raise ProtocolError(f"not a list of nodes to check: {value[:100]!r}") from exc
