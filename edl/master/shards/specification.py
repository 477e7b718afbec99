"""Checks of names and specifications, before a command changes anything."""

from __future__ import annotations

import math
from typing import Final

from edl.errors import SettingsError
from edl.protocol import master
from edl.quoting import quote, shown

__all__ = ["MOST_UNITS", "MOST_WANTED", "check_name", "check_spec", "describe_difference", "is_same_spec"]

MOST_WANTED: Final = 10_000
"""Shards in a turn, wanted or reported: a reply of some 300 KB, and a turn of 20 ms in which all others wait."""
_MOST_NAME: Final = 200
"""Characters of a name: those of keys of a store, where names end up, have 512 in all."""
MOST_UNITS: Final = 2**62
"""Units of a data set: sums of two such numbers are still 64-bit ones."""
_MOST_SHARDS: Final = 2**40
"""Shards of an epoch: a permutation of this many is computed, and tested."""
_MOST_SECONDS: Final = 30 * 86_400.0
"""Longest lease: a month without a sign of life is forever."""


def check_name(what: str, name: str) -> None:
    """Raise SettingsError unless a name can be shown and stored; `what` has the name, for the error."""
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        raise SettingsError(f"{what} {quote(name)}: 1 to {_MOST_NAME} printable characters are possible")


def check_spec(name: str, spec: master.DatasetSpec) -> master.DatasetSpec:
    """Return a copy of a data set's specification with its defaults: 3 failures, leases of 60 s, sessions of 30 s.

    Raises:
        SettingsError: It is invalid.
    """
    check_name("data set", name)
    checked = master.DatasetSpec()
    checked.CopyFrom(spec)
    checked.max_failures = spec.max_failures or 3
    checked.lease_s = spec.lease_s or 60.0
    checked.session_s = spec.session_s or 30.0
    bounded = spec.HasField("units")
    problems = {
        "kind: a name is needed": not spec.kind or len(spec.kind) > _MOST_NAME or not spec.kind.isprintable(),
        f"units={spec.units}: 0 to 2**62 are possible": not 0 <= spec.units <= MOST_UNITS,
        f"shard_size={spec.shard_size}: 1 to 2**62 are possible": not 1 <= spec.shard_size <= MOST_UNITS,
        f"epochs={spec.epochs}: 0 or more are possible": spec.epochs < 0,
        f"max_failures={spec.max_failures}: 1 or more are possible": spec.max_failures < 0,
        f"commit={spec.commit}: not known": spec.commit not in (master.COMMIT_REPORT, master.COMMIT_CHECKPOINT),
        "a source without an end is neither shuffled nor read several times": not bounded
        and (spec.shuffle or spec.epochs > 1),
        f"flush_s={spec.flush_s}: needs a source without an end, and seconds from 0 on": not (
            0 <= spec.flush_s < math.inf and (spec.flush_s == 0 or not bounded)
        ),
    }
    for field in ("lease_s", "session_s"):
        value = getattr(checked, field)
        problems[f"{field}={value}: 0.1 to {_MOST_SECONDS:.0f} are possible"] = not 0.1 <= value <= _MOST_SECONDS
    for problem, found in problems.items():
        if found:
            raise SettingsError(f"data set {shown(name)}: {problem}")
    if spec.units // spec.shard_size >= _MOST_SHARDS:
        raise SettingsError(
            f"data set {shown(name)}: shards of {spec.shard_size} make {spec.units // spec.shard_size:,} of"
            f" {spec.units:,} units; at most {_MOST_SHARDS:,} are possible"
        )
    return checked


def is_same_spec(first: master.DatasetSpec, second: master.DatasetSpec) -> bool:
    """Whether two specifications, their defaults filled in, are equal."""
    return first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def describe_difference(present: master.DatasetSpec, other: master.DatasetSpec) -> str:
    """Return in words which fields of two specifications differ, the present one's value first."""
    return ", ".join(
        f"{field.name} is {shown(repr(getattr(present, field.name)), 100)}"
        f" and not {shown(repr(getattr(other, field.name)), 100)}"
        for field in master.DatasetSpec.DESCRIPTOR.fields
        if (getattr(present, field.name), field.has_presence and present.HasField(field.name))
        != (getattr(other, field.name), field.has_presence and other.HasField(field.name))
    )
