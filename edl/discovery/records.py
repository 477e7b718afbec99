"""Defines instances of a service, the values that every registry can hold, and the treatment of other values.

A registry holds an instance as JSON. Other programs may write to the registry too, so records that are read are checked
as strictly as instances that are registered. An invalid record becomes a `Rejected` that contains the reason, and does
not affect other records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from edl.errors import SettingsError
from edl.quoting import shown

MIN_TTL_S, MAX_TTL_S = 0.5, 86_400.0
"""With less than half a second, a busy machine misses renewals. Consul refuses more than a day."""
MAX_META, MAX_META_BYTES = 60, 512
"""Consul's limits (64 names, four of which EDL uses), enforced everywhere so that programs work on every registry."""
MAX_TAGS = 64  # as many as Consul allows metadata names; Consul does not limit tags
MAX_RECORD = 1_000_000
"""Maximum length of a record that is read, in characters. EDL's own records are at most a quarter as long, so that they
fit into a store's value."""
RESERVED_META = frozenset({"model", "capacity", "state"})

_State = Literal["ready", "draining"]
_SERVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_META_KEY = re.compile(r"(?!consul-|edl-)[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class Instance:
    """A process that offers a service.

    Text is printable and at most 512 bytes long, so that every registry can hold it.

    Attributes:
        service: Name under which students find teachers: 1 to 128 letters, digits, `-`, `_` and `.`, with
            a letter or digit at both ends.
        id: Unique within the service. Keep the id across restarts if others should see the restarted process as the
            same instance.
        address: Host name or IP address at which others reach the process, or `unix:/path`. Must not be `0.0.0.0` or
            `::`.
        port: TCP port, 1 to 65535; must be 0 for a Unix socket.
        capacity: Relative weight in balancing: a teacher with 2.0 takes twice as many students as a teacher with 1.0.
            Positive and finite.
        state: "ready", or "draining" while the process finishes its work and takes no new work.
        model: Name of the served model in KServe v2 requests; empty if clients already know it.
        tags: For users; at most 64 tags. In Consul, these tags are the service's tags.
        meta: For users; at most 60 names. A name contains only letters, digits, `-` and `_`, is not `model`, `capacity`
            or `state`, and does not begin with `consul-` or `edl-`. In Consul, these entries are the service's
            metadata.
    """

    service: str
    id: str
    address: str
    port: int
    capacity: float = 1.0
    state: Literal["ready", "draining"] = "ready"
    model: str = ""
    tags: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """The gRPC target: `host:port` or `unix:/path`."""
        if self.address.startswith("unix:"):
            return self.address
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Rejected:
    """A registration that cannot be used and is left out of the instances.

    Attributes:
        id: The instance's id if it is text; otherwise the name of the registration in the registry.
        reason: The invalid value, and which values are accepted.
    """

    id: str
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """The instances of a service at one moment.

    Attributes:
        service: The service's name.
        instances: Instances with a live lease, sorted by id; every id appears once.
        rejected: Registrations that cannot be used, sorted by id.
        stale: Empty while the registry answers. Otherwise the reason why the registry does not answer; `instances` then
            contains the last known instances. Instances that are missing in the first 5 s after an outage are also
            kept, with `stale` set: the registry may have lost its data, and these instances may not have registered
            again yet.
        lapsed: Instances whose lease expired without a deregistration, with the values that they registered last,
            sorted by id. The process of a lapsed instance may be dead, paused, or unable to reach the registry, or the
            registry may not be writable. Only a request to the process itself shows whether it is alive. The registry
            forgets lapsed instances after about a minute, but a SQLite file that no process can write to keeps them.
        revoked: Ids of registered instances that a `BalanceGroup` assigned to this student before and has since taken
            away; empty without a group.
    """

    service: str
    instances: tuple[Instance, ...]
    rejected: tuple[Rejected, ...] = ()
    stale: str = ""
    lapsed: tuple[Instance, ...] = ()
    revoked: frozenset[str] = frozenset()


def is_service(name: object) -> bool:
    """Return whether every registry accepts `name` for a service. Other programs may register invalid names."""
    return isinstance(name, str) and _SERVICE.fullmatch(name) is not None


def check_service(service: str) -> str:
    """Return `service` if every registry accepts it as a service's name; else raise SettingsError."""
    if not is_service(service):
        raise SettingsError(
            f"service {service!r}: a name has 1 to 128 letters, digits, '-', '_' and '.', and starts and ends with a"
            " letter or digit (Consul's DNS accepts only letters, digits and '-')"
        )
    return service


def check_ttl(ttl_s: float) -> float:
    """Return `ttl_s` if every registry supports leases of that length; else raise SettingsError."""
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise SettingsError(f"ttl_s={ttl_s!r}: must be between {MIN_TTL_S} and {MAX_TTL_S} seconds")
    return float(ttl_s)


def validated(instance: Instance) -> Instance:
    """Return `instance` if every registry can hold it and hand it out; else raise SettingsError."""
    check_service(instance.service)
    found = parsed(instance.service, instance.id, _fields(instance))
    if isinstance(found, Rejected):
        raise SettingsError(f"instance {instance.id!r} of service {instance.service!r}: {found.reason}")
    return found


def to_json(instance: Instance) -> str:
    """Return `instance`, without its `service`, as JSON."""
    fields = {"id": instance.id, **_fields(instance)}
    return json.dumps(fields, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def from_json(service: str, name: str, text: str | bytes) -> Instance | Rejected:
    """Return a record's instance, or the reason why the record cannot be used; `name` replaces a missing id."""
    fields: Any = None
    reason = f"{len(text):,} characters, more than {MAX_RECORD:,}"
    if len(text) <= MAX_RECORD:
        try:
            fields = json.loads(text)
            reason = f"expected a JSON object, not {type(fields).__name__}"
        except (ValueError, RecursionError) as exc:
            reason = f"not JSON: {exc}"
    if not isinstance(fields, dict):
        return Rejected(shown(name, MAX_META_BYTES), reason)
    found = fields.get("id")
    return parsed(service, found if isinstance(found, str) else name, fields)


def parsed(service: str, instance_id: str, fields: Mapping[str, Any]) -> Instance | Rejected:
    """Return the instance that the known `fields` describe, or the reason why the fields cannot be used."""
    try:
        if instance_id == "":
            raise ValueError("id is empty")
        address = _text("address", fields.get("address"))
        if not address or any(char.isspace() for char in address):
            raise ValueError(f"address {address!r} is empty or contains blanks")
        if address in ("0.0.0.0", "::"):
            raise ValueError(f"address {address!r} means every interface: others cannot connect to it")
        return Instance(
            service=service,
            id=_text("id", instance_id),
            address=address,
            port=_port(address, fields.get("port")),
            capacity=_capacity(fields.get("capacity", 1.0)),
            state=_state(fields.get("state", "ready")),
            model=_text("model", fields.get("model", "")),
            tags=_tags(fields.get("tags", ())),
            meta=_meta(fields.get("meta", {})),
        )
    except ValueError as exc:
        return Rejected(shown(instance_id, MAX_META_BYTES), str(exc))


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
    # Printable only: names end up in logs and terminals, where control characters could forge output.
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > MAX_META_BYTES:
        raise ValueError(f"{name} {value!r:.80} is not printable text of at most {MAX_META_BYTES} bytes")
    return value


def _port(address: str, value: object) -> int:
    if value is None:
        raise ValueError("port is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError(f"port {value!r:.80} is not a whole number from 1 to 65535")
    if (value == 0) != address.startswith("unix:"):
        raise ValueError(
            f"port {value} does not match address {address!r}: a unix: address must have port 0, any other address a "
            "port above 0"
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
    raise ValueError(f"state {value!r:.80} is not one of {', '.join(get_args(_State))}")


def _tags(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_TAGS:
        raise ValueError(f"tags {value!r:.80} are not a list of at most {MAX_TAGS} tags")
    return tuple(_text("tag", tag) for tag in value)


def _meta(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_META:
        raise ValueError(f"meta {value!r:.80} is not a mapping of at most {MAX_META} names")
    for key in value:
        if not isinstance(key, str) or not _META_KEY.fullmatch(key) or key in RESERVED_META:
            raise ValueError(
                f"meta key {key!r:.80}: expected at most 128 letters, digits, '-' and '_', not one of"
                f" {', '.join(sorted(RESERVED_META))}, and not starting with 'consul-' or 'edl-'"
            )
    return {key: _text(f"meta {key!r}", text) for key, text in value.items()}
