"""torch's rendezvous state as JSON and back.

torch's own backends exchange the state as a pickle, and unpickling what came over a network means to run any code
in it. Here it is taken apart into plain values, and put together again from values that were checked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, Final

import torch
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from edl.errors import ProtocolError, SettingsError

__all__ = ["check_torch", "decode", "encode"]

_FORMAT: Final = 1  # another is refused
_STATE_FIELDS: Final = {
    *("round", "complete", "deadline", "closed"),
    *("participants", "wait_list", "redundancy_list", "last_heartbeats"),
}
_NODE_FIELDS: Final = {"addr", "pid", "local_id"}


def check_torch() -> None:
    """Make sure that the state consists of the fields that this module knows.

    Raises:
        SettingsError: this version of torch keeps another state.
    """
    state, node = set(vars(_RendezvousState())), {field.name for field in dataclasses.fields(_NodeDesc)}
    odd = sorted((state ^ _STATE_FIELDS) | (node ^ _NODE_FIELDS))
    if odd:
        raise SettingsError(
            f"torch {torch.__version__} keeps another rendezvous state than EDL knows (differing in {', '.join(odd)}): "
            "use `edl run`, which does not need it, or --rdzv-backend=c10d"
        )


def encode(state: _RendezvousState) -> bytes:
    """Return the state as JSON.

    Args:
        state: of torch's rendezvous.
    """
    form = {
        "format": _FORMAT,
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else _timestamp(state.deadline),
        "closed": state.closed,
        "participants": [[_plain(node), rank] for node, rank in state.participants.items()],
        "wait_list": _plain_list(state.wait_list),
        "redundancy_list": _plain_list(state.redundancy_list),
        "last_heartbeats": [[_plain(node), _timestamp(when)] for node, when in state.last_heartbeats.items()],
    }
    return json.dumps(form).encode()


def decode(data: bytes) -> _RendezvousState:
    """Read a state that `encode` wrote.

    Args:
        data: JSON.

    Raises:
        ProtocolError: the bytes are something else.
    """
    try:
        form = json.loads(data)
        if not isinstance(form, dict) or form["format"] != _FORMAT:
            raise ValueError("of another version of EDL")
        state = _RendezvousState()
        state.round = _typed(form["round"], int)
        state.complete = _typed(form["complete"], bool)
        state.deadline = None if form["deadline"] is None else _moment(form["deadline"])
        state.closed = _typed(form["closed"], bool)
        state.participants = {_node(node): _typed(rank, int) for node, rank in form["participants"]}
        state.wait_list = {_node(node) for node in form["wait_list"]}
        state.redundancy_list = {_node(node) for node in form["redundancy_list"]}
        state.last_heartbeats = {_node(node): _moment(when) for node, when in form["last_heartbeats"]}
    except (ValueError, TypeError, KeyError, OverflowError, OSError) as exc:
        raise ProtocolError(f"not a rendezvous state: {data[:100]!r} ({exc})") from exc
    return state


def _plain(node: _NodeDesc) -> Mapping[str, Any]:
    return {"addr": node.addr, "pid": node.pid, "local_id": node.local_id}


def _plain_list(nodes: Iterable[_NodeDesc]) -> list[Mapping[str, Any]]:
    return [_plain(node) for node in sorted(nodes)]


def _node(form: Any) -> _NodeDesc:
    return _NodeDesc(_typed(form["addr"], str), _typed(form["pid"], int), _typed(form["local_id"], int))


def _timestamp(moment: datetime) -> float:
    return moment.timestamp()


def _moment(seconds: Any) -> datetime:
    return datetime.fromtimestamp(_typed(seconds, float), timezone.utc)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} where {kind.__name__} is expected")
    return value
