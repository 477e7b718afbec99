"""Describes what happened between two snapshots of a service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edl.discovery.registry import Instance, Snapshot

__all__ = ["Change", "brief_meta", "changes", "instance_as_dict", "printable", "snapshot_as_dict"]


@dataclass(frozen=True)
class Change:
    """An event of a teacher, or (`id` empty) of the registry itself."""

    kind: Literal["joined", "left", "lapsed", "changed", "rejected", "stale", "fresh"]
    service: str
    id: str = ""
    detail: str = ""


def changes(before: Snapshot | None, after: Snapshot) -> Iterator[Change]:
    """Yield the changes from `before` (None if nothing was known) to `after`, ordered by id.

    While the registry does not answer, `after` repeats what was known last, so no teacher seems to leave.
    """
    service = after.service
    old = {instance.id: instance for instance in before.instances} if before else {}
    new = {instance.id: instance for instance in after.instances}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lapsed = any(instance.id == name for instance in after.lapsed)
            yield Change("lapsed" if lapsed else "left", service, name, old[name].endpoint)
        elif name not in old:
            yield Change("joined", service, name, _introduction(new[name]))
        elif difference := _difference(old[name], new[name]):
            yield Change("changed", service, name, difference)
    known = {(bad.id, bad.reason) for bad in before.rejected} if before else set()
    for bad in after.rejected:
        if (bad.id, bad.reason) not in known:
            yield Change("rejected", service, bad.id, bad.reason)
    was_stale = before.stale if before else ""
    if after.stale and not was_stale:
        yield Change("stale", service, detail=after.stale)
    elif was_stale and not after.stale:
        yield Change("fresh", service)


def _introduction(instance: Instance) -> str:
    words = [instance.endpoint]
    if instance.model:
        words.append(f"model {instance.model}")
    words.append(f"capacity {instance.capacity:g}")
    if instance.state != "ready":
        words.append(instance.state)
    return ", ".join(words)


def _difference(old: Instance, new: Instance) -> str:
    words = []
    if old.state != new.state:
        words.append(f"{old.state} -> {new.state}")
    for name in ("endpoint", "model", "capacity", "tags", "meta"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            words.append(f"{name} {_show(before)} -> {_show(after)}")
    return ", ".join(words)


def _show(value: object) -> str:
    if isinstance(value, dict):
        return brief_meta(value)
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def brief_meta(meta: Any, limit: int = 48) -> str:
    """Return metadata as `key=value key=value`, cut at `limit` characters, without `boot`, which only programs need."""
    text = " ".join(f"{key}={value}" for key, value in sorted(meta.items(), key=_version_first) if key != "boot")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _version_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != "version", item[0]


def printable(text: str) -> str:
    """Return `text` without control characters: a name from elsewhere could contain escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def instance_as_dict(instance: Instance) -> dict[str, Any]:
    """Return an instance as JSON shows it."""
    return {**asdict(instance), "meta": dict(instance.meta), "endpoint": instance.endpoint}


def snapshot_as_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON shows it."""
    return {
        "service": snapshot.service,
        "stale": snapshot.stale,
        "instances": [instance_as_dict(instance) for instance in snapshot.instances],
        "lapsed": [instance_as_dict(instance) for instance in snapshot.lapsed],
        "rejected": [asdict(bad) for bad in snapshot.rejected],
    }
