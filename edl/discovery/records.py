"""Instances as a registry holds them: which values are acceptable, and what to do with others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from edl.discovery.registry import Instance, Rejected
from edl.errors import SettingsError
from edl.quoting import shown

__all__ = ["check_service", "check_ttl", "from_fields", "from_json", "is_service", "parsed", "to_json", "validated"]

MIN_TTL_S, MAX_TTL_S = 0.5, 86_400.0
"""Below half a second a busy machine misses renewals; Consul refuses more than a day."""
# Consul's limits on metadata (64 names, four of them EDL's own), kept everywhere so that a program that runs on one
# registry runs on the other.
MAX_META, MAX_META_BYTES = 60, 512
MAX_TAGS = 64  # as many as names in the metadata; Consul itself has no limit
# What 60 names and 64 tags of 512 bytes come to, each byte escaped, with room to spare.
MAX_RECORD = 1_000_000
RESERVED_META = frozenset({"model", "capacity", "state"})

_State = Literal["ready", "draining"]
_SERVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_META_KEY = re.compile(r"(?!consul-|edl-)[A-Za-z0-9_-]{1,128}")


def is_service(name: object) -> bool:
    """Whether `name` can name a service in every registry. Others may have put names there that cannot."""
    return isinstance(name, str) and _SERVICE.fullmatch(name) is not None


def check_service(service: str) -> str:
    """`service`, if it can name a service in every registry.

    Raises:
        SettingsError: it cannot.
    """
    if not is_service(service):
        raise SettingsError(
            f"service {service!r}: a name has 1 to 128 letters, digits, '-', '_' and '.', and starts and ends with a"
            " letter or digit (Consul's DNS knows letters, digits and '-' only)"
        )
    return service


def check_ttl(ttl_s: float) -> float:
    """`ttl_s`, if leases of that length can be kept.

    Raises:
        SettingsError: it is out of range.
    """
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise SettingsError(f"ttl_s={ttl_s!r}: must lie between {MIN_TTL_S} and {MAX_TTL_S} seconds")
    return float(ttl_s)


def validated(instance: Instance) -> Instance:
    """`instance`, if every registry can hold it and hand it out.

    Raises:
        SettingsError: a value is unusable; the message names it.
    """
    check_service(instance.service)
    fields = _fields(instance)
    try:
        again = from_fields(instance.service, instance.id, fields)
    except ValueError as exc:
        raise SettingsError(f"instance {instance.id!r} of service {instance.service!r}: {exc}") from exc
    return again


def to_json(instance: Instance) -> str:
    """`instance` without its service and id, as JSON."""
    return json.dumps(_fields(instance), separators=(",", ":"), sort_keys=True)


def from_json(service: str, instance_id: str, text: str | bytes) -> Instance | Rejected:
    """Read a record: what was registered, or why it cannot be used."""
    if len(text) > MAX_RECORD:
        return Rejected(shown(instance_id, MAX_META_BYTES), f"{len(text):,} characters, more than {MAX_RECORD:,}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return Rejected(shown(instance_id, MAX_META_BYTES), f"not JSON: {exc}")
    if not isinstance(fields, dict):
        return Rejected(shown(instance_id, MAX_META_BYTES), f"a JSON object is expected, not {type(fields).__name__}")
    return parsed(service, instance_id, fields)


def parsed(service: str, instance_id: str, fields: Mapping[str, Any]) -> Instance | Rejected:
    """Return the instance that `fields` describe, or why it cannot be used."""
    try:
        return from_fields(service, instance_id, fields)
    except ValueError as exc:
        return Rejected(shown(instance_id, MAX_META_BYTES), str(exc))


def from_fields(service: str, instance_id: str, fields: Mapping[str, Any]) -> Instance:
    """Return the instance that `fields` describe; unknown fields are ignored.

    Raises:
        ValueError: a field is missing or makes no sense.
    """
    address = _text("address", fields.get("address"))
    if not address or any(char.isspace() for char in address):
        raise ValueError(f"address {address!r} is empty or has blanks")
    if address in ("0.0.0.0", "::"):
        raise ValueError(f"address {address!r} means every interface: others cannot connect to it")
    meta = fields.get("meta", {})
    return Instance(
        service=service,
        id=_id(instance_id),
        address=address,
        port=_port(address, fields.get("port")),
        capacity=_capacity(fields.get("capacity", 1.0)),
        state=_state(fields.get("state", "ready")),
        model=_text("model", fields.get("model", "")),
        tags=_tags(fields.get("tags", ())),
        meta=_meta(meta),
    )


def _fields(instance: Instance) -> dict[str, Any]:
    return {
        "address": instance.address,
        "port": instance.port,
        "capacity": instance.capacity,
        "state": instance.state,
        "model": instance.model,
        "tags": instance.tags,
        "meta": dict(instance.meta) if isinstance(instance.meta, Mapping) else instance.meta,
    }


def _text(name: str, value: object) -> str:
    # Printable only: names end up in logs and terminals, where control characters could pretend things.
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > MAX_META_BYTES:
        raise ValueError(f"{name} {value!r:.80} is not printable text of at most {MAX_META_BYTES} bytes")
    return value


def _id(value: object) -> str:
    if not _text("id", value):
        raise ValueError("id is empty")
    return str(value)


def _port(address: str, value: object) -> int:
    if value is None:
        raise ValueError("port is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError(f"port {value!r:.80} is not a whole number from 1 to 65535")
    if (value == 0) != address.startswith("unix:"):
        raise ValueError(
            f"port {value} does not go with address {address!r}: 0 is for a unix: address, and only for it"
        )
    return value


def _capacity(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"capacity {value!r:.80} is not a number")
    try:
        capacity = float(value)
    except OverflowError:  # an int of hundreds of digits
        capacity = math.inf
    if not (math.isfinite(capacity) and capacity > 0):
        raise ValueError(f"capacity {capacity!r} is not a finite number above 0")
    return capacity


def _state(value: object) -> _State:
    for state in get_args(_State):
        if value == state:
            return state  # type: ignore[no-any-return]
    raise ValueError(f"state {value!r:.80} is neither of {', '.join(get_args(_State))}")


def _tags(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_TAGS:
        raise ValueError(f"tags {value!r:.80} are not a list of at most {MAX_TAGS}")
    return tuple(_text("tag", tag) for tag in value)


def _meta(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_META:
        raise ValueError(f"meta {value!r:.80} is not a mapping of at most {MAX_META} names")
    for key in value:
        if not isinstance(key, str) or not _META_KEY.fullmatch(key) or key in RESERVED_META:
            raise ValueError(
                f"meta key {key!r:.80}: letters, digits, '-' and '_', at most 128, none of"
                f" {', '.join(sorted(RESERVED_META))}, not starting with 'consul-' or 'edl-'"
            )
    return {key: _text(f"meta {key!r}", text) for key, text in value.items()}
