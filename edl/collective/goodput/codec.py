"""A node's ledger and events as the JSON that the Store keeps. All that is read is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.collective.goodput.node import NodeRecord, ProgressMark
from edl.collective.goodput.spans import Span, TimeCategory
from edl.errors import ProtocolError

__all__ = ["Event", "decode_events", "decode_record", "encode_events", "encode_record"]

VERSION: Final = 1  # of the format; another is refused
_MAX_TEXT: Final = 300  # characters of an event: a line or two; 300 events stay below 120 KB in ASCII


@dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Attributes:
        at_us: wall clock, microseconds since 1970.
        node: that it happened to, or that saw it.
        kind: "join", "leave", "kill", "exit", "hang", "faulty", "restart", "generation" or "error"; others
            are shown as they are.
        text: what happened, in a few words.
        generation: of the world in which it happened, -1 before the first.
    """

    at_us: int
    node: str
    kind: str
    text: str = ""
    generation: int = -1


def encode_record(record: NodeRecord) -> bytes:
    """Write a ledger as JSON: below 60 KB with `MAX_SPANS` spans and 300 marks.

    Args:
        record: the ledger.
    """
    fields = {
        "version": VERSION,
        "states": [state.name.lower() for state in TimeCategory],
        "node": record.node,
        "began_us": record.began_us,
        "workers": record.workers,
        "spans": [[span.workers, int(span.running), *span.amounts] for span in record.spans],
        "marks": [[mark.at_us, mark.step, mark.samples] for mark in record.marks],
        "generation": record.generation,
        "step": record.step,
        "reached": record.reached,
        "steps_per_s": round(record.steps_per_s, 4),
        "samples_per_s": round(record.samples_per_s, 4),
        "ended": record.ended,
        "replicated_us": record.replicated_us,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_record(data: bytes, where: str) -> NodeRecord:
    """Read a ledger that `encode_record` wrote.

    Args:
        data: JSON.
        where: names it in errors.

    Raises:
        ProtocolError: they are something else, or of another version.
    """
    fields = _fields(data, where)
    try:
        return NodeRecord(
            node=_text(fields["node"]),
            began_us=_whole(fields["began_us"]),
            workers=_whole(fields["workers"]),
            spans=tuple(_span(row) for row in fields["spans"]),
            marks=tuple(
                ProgressMark(_whole(at), _whole(step, -1), _whole(samples)) for at, step, samples in fields["marks"]
            ),
            generation=_whole(fields["generation"], -1),
            step=_whole(fields["step"], -1),
            reached=_whole(fields.get("reached", -1), -1),
            steps_per_s=_rate(fields["steps_per_s"]),
            samples_per_s=_rate(fields["samples_per_s"]),
            ended=fields["ended"] is True,
            replicated_us=_whole(fields.get("replicated_us", 0)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is not a ledger: {exc!r}") from exc


def encode_events(events: Sequence[Event]) -> bytes:
    """Write events as JSON.

    Args:
        events: of an agent, oldest first.
    """
    rows = [[event.at_us, event.node, event.kind, event.text[:_MAX_TEXT], event.generation] for event in events]
    return json.dumps({"version": VERSION, "events": rows}, separators=(",", ":")).encode()


def decode_events(data: bytes, where: str) -> list[Event]:
    """Read events that `encode_events` wrote.

    Args:
        data: JSON.
        where: names it in errors.

    Raises:
        ProtocolError: they are something else, or of another version.
    """
    rows = _fields(data, where).get("events")
    try:
        return [
            Event(_whole(at_us), _text(node), _text(kind), _text(text), _whole(generation, -1))
            for at_us, node, kind, text, generation in rows or ()
        ]
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{where} is not a list of events: {exc!r}") from exc


def _fields(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{where} is not JSON: {exc}") from exc
    if not isinstance(fields, dict) or "version" not in fields:
        raise ProtocolError(f"{where} has no version: nothing of EDL wrote it")
    if fields["version"] != VERSION:
        raise ProtocolError(
            f"{where} has version {fields['version']!r:.20}; this edl reads version {VERSION}: use the job's edl"
        )
    return fields


def _span(row: Any) -> Span:
    workers, running, *amounts = row
    if len(amounts) != len(TimeCategory):
        raise ValueError(f"{len(amounts)} states in place of {len(TimeCategory)}")
    return Span(tuple(_whole(amount) for amount in amounts), _whole(workers), bool(running))


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise ValueError(f"{value!r:.40} is not a whole number from {least}")
    return value


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.40} is not a number from 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value
