"""What people see of a data set."""

from __future__ import annotations

import itertools
from typing import Any, Final

from edl.master.shards.cursors import StreamCursor
from edl.master.shards.dataset import DatasetShards

__all__ = ["dataset_status"]

_MOST_POISONED: Final = 50
"""Poisoned shards with their reasons: a page of them; all are counted. The whole is to stay below 200 KB."""
_MOST_HOLDERS: Final = 500
"""Sessions; some 100 bytes of JSON each."""


def dataset_status(dataset: DatasetShards) -> dict[str, Any]:
    """Return a data set's counts, its poisoned shards with the reasons, and who reads it.

    A shard with parts in several states counts as poisoned before doing before todo. Looks at everything that is out of
    the ordinary: some milliseconds with ten thousand leases.
    """
    spec, cursor = dataset.spec, dataset.cursor
    poisoned = set(dataset.poisoned)
    doing = {(lease.epoch, lease.shard) for session in dataset.sessions.values() for lease in session.leases.values()}
    doing -= poisoned
    waiting = {key for key, *_ in dataset.returned}
    if cursor.begun_shard is not None:
        waiting.add((cursor.epoch, cursor.begun_shard))
    waiting -= poisoned | doing
    began = cursor.epoch * -(-cursor.units // spec.shard_size) + cursor.shards_given
    return {
        "name": dataset.name,
        "kind": spec.kind,
        "epoch": cursor.epoch,
        "epochs": spec.epochs or (0 if not dataset.is_stream else 1),
        "units": cursor.units,
        "ended": not isinstance(cursor, StreamCursor) or cursor.ended,
        "units_done": dataset.units_done,
        "provisional_units": dataset.provisional_units,
        "finished": dataset.is_finished and not dataset.provisional_units,
        "shards": {
            "todo": len(waiting) + cursor.shards_left,
            "doing": len(doing),
            "done": began - len(waiting) - len(doing) - len(poisoned),
            "poisoned": len(poisoned),
        },
        "poisoned": [_poisoned_shard(dataset, key) for key in itertools.islice(sorted(poisoned), _MOST_POISONED)],
        "holders": [
            {
                "holder": session.holder,
                "session": session.id,
                "leases": len(session.leases),
                "units_done": session.units_done,
            }
            for session in itertools.islice(dataset.sessions.values(), _MOST_HOLDERS)
        ],
    }


def _poisoned_shard(dataset: DatasetShards, key: tuple[int, int]) -> dict[str, Any]:
    parts = dataset.poisoned[key]
    return {
        "shard": key[1],
        "epoch": key[0],
        "start": parts[0][0],
        "stop": parts[-1][1],
        "failures": [
            {"holder": failure.holder, "reason": failure.reason, "time": failure.time_ms / 1000}
            for failure in dataset.failures.get(key, ())
        ],
    }
