"""`RevisionTerm`: which of several operators replaces the teachers of a pool whose revision changed without an edit.

Operators of two versions, or with different `--store`, have two revisions of one spec, and each would replace what the
other makes. The status says whose revision counts and since when. The others leave the pool alone for a while, and
whoever takes over replaces nothing until it has not been contradicted for longer than that: two that run at the same
time replace nothing, and one that is alone goes on after a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edl.kube.objects import format_time
from edl.master.kube.members.records import read_time
from edl.master.kube.resources import TeacherPool

__all__ = ["RevisionTerm"]

_YIELD_S: Final = 30.0
"""For so long a revision counts that another operator wrote: it writes none where it is gone."""
_HOLD_S: Final = 60.0
"""After so long nothing but the pool's own operator is there: another would have taken over after `_YIELD_S`."""


@dataclass(frozen=True)
class RevisionTerm:
    """Since when a revision is the pool's that came without an edit.

    Attributes:
        since_s: Unix time; None for a revision that came by an edit, or a while ago.
        yields_s: how long the pool is another operator's to look after, in seconds; 0 if it is not.
        held_s: how long no teacher is to be replaced, in seconds; 0 if they may be.
    """

    since_s: float | None = None
    yields_s: float = 0.0
    held_s: float = 0.0

    @classmethod
    def of(cls, pool: TeacherPool, revision: str, labelled: bool, now_s: float) -> RevisionTerm:
        """Read it."""
        if pool.status.get("observedGeneration") != pool.generation:
            return cls()
        since_s = read_time(pool.status.get("revisionSince"))
        age_s = now_s - since_s if since_s is not None else -1.0
        if pool.status.get("revision") == revision:
            return cls(since_s, held_s=_HOLD_S - age_s) if 0 <= age_s < _HOLD_S else cls()
        known = bool(pool.status.get("revision"))  # an operator that knows no revisions drops it
        if 0 <= age_s < _YIELD_S and known:
            return cls(since_s, yields_s=_YIELD_S - age_s)
        return cls(now_s, held_s=_HOLD_S) if known or labelled else cls()

    def format(self) -> str | None:
        """Return `status.revisionSince`."""
        return None if self.since_s is None else format_time(self.since_s)
