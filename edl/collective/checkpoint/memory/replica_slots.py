"""Keeps the states that a node replicates on its peer, and names their files. Workers and agents use this module.

Replicas of a lost host's shards are useful only if all ranks' shards from the same step can be found. So about every 10
s, all ranks agree on a save whose state is *kept*: the slot's file gets a second name, so that no later save overwrites
the state while the agent sends it to its peer. The kept states are therefore the same on all nodes, and agents need not
ask one another.

::

    slots-0.0, .1         the last two saves of local rank 0
    slots-0-kept.0, .1    the last two kept for a replica: the same files, or files that were slots
    slots-0.spare         memory of a state that is no longer kept
    replicas/NODE-0.0, .1 the last two of another node's local rank 0, as its agent sent them
    replicas/wanted       the agent's request to keep the next state

An agent that has sent the newest kept state requests a state newer than that one. A worker that has already kept a
newer state does not agree to keep another. So on every node, the older of two kept states has a replica until the newer
state has one. When all ranks agree to keep a third state, the first is removed before the third is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.collective.checkpoint.memory.slots import (
    CompleteSlot,
    SlotPair,
    StateVersion,
    find_slots,
    kept_prefix,
    slot_paths,
    spare_path,
)
from edl.settings import read

NO_VERSION: StateVersion = (-1, -1, -1)  # older than any state


def newest_common_state(held: Sequence[Iterable[CompleteSlot]]) -> list[CompleteSlot]:
    """Return the slots, by worker, of the newest state of which every worker holds its part; [] if there is none."""
    # Of two slots with the same step, as around an evaluation, the later one counts.
    parts = [{slot.header.version: slot for slot in sorted(found, key=lambda slot: slot.sequence)} for found in held]
    common = set.intersection(*map(set, parts)) if parts else set()
    return [by_version[max(common)] for by_version in parts] if common else []


@dataclass(frozen=True)
class ReplicaFolder:
    """A node's folder of replicas."""

    path: Path

    def slot_prefix(self, node: str, local_rank: int) -> Path:
        return self.path / f"{node}-{local_rank}"

    def slot_prefixes(self) -> list[Path]:
        return sorted({path.with_suffix("") for path in self.path.glob("*-*.[01]")})

    def find_replicas(self) -> list[CompleteSlot]:
        return [slot for prefix in self.slot_prefixes() for slot in find_slots(prefix)]

    def request_newer_than(self, newer_than: StateVersion | None) -> None:
        """Ask the workers to keep a state newer than this version; None withdraws the request."""
        if newer_than is None:
            self._word.unlink(missing_ok=True)
            return
        draft = self.path / f"wanted.{os.getpid()}"
        draft.write_text(" ".join(map(str, newer_than)))
        draft.rename(self._word)

    def requested_version(self) -> StateVersion | None:
        with contextlib.suppress(OSError, ValueError):
            generation, step, world = map(int, self._word.read_text().split())
            return generation, step, world
        return None

    def drop_older_than(self, version: StateVersion) -> None:
        """Remove the replicas of workers whose replicas are all older than `version`."""
        for prefix in self.slot_prefixes():
            if all(slot.header.version < version for slot in find_slots(prefix)):
                for path in (prefix.with_name(prefix.name + end) for end in (".0", ".1")):
                    path.unlink(missing_ok=True)

    @property
    def _word(self) -> Path:
        return self.path / "wanted"


class ReplicaSlots:
    """A worker's kept states, in `slots` (only read or invalidate them), and other nodes' replicas."""

    def __init__(self, slots: Path, folder: ReplicaFolder) -> None:
        self.slots = SlotPair(kept_prefix(slots))
        self._names = slot_paths(self.slots.prefix)
        self._spare = spare_path(slots)
        self._folder = folder
        self._given_up = False

    @classmethod
    def from_env(cls, slots: Path) -> ReplicaSlots | None:
        """Return an object for the folder that `EDL_REPLICAS` names; None without an agent that replicates."""
        folder = read("EDL_REPLICAS", Path)
        return None if folder is None else cls(slots, ReplicaFolder(folder))

    def is_state_requested(self) -> bool:
        """Return whether the agent requests a state newer than all states that are kept here."""
        word = self._folder.requested_version() if not self._given_up else None
        return word is not None and all(slot.header.version <= word for slot in self.slots.find_complete())

    def free_oldest_slot(self) -> None:
        """Free the memory of the older of two kept states, or make it the spare file."""
        there = [path for path in self._names if path.exists()]
        if len(there) == len(self._names):
            versions = {found.path: found.header.version for found in self.slots.find_complete()}
            oldest = min(there, key=lambda path: versions.get(path, NO_VERSION))
            if oldest.stat().st_nlink == 1 and not self._spare.exists():
                oldest.rename(self._spare)
            else:
                oldest.unlink()

    def keep_slot(self, saved: CompleteSlot) -> None:
        """Keep this state, which is newer than all kept states, even when other states are saved later."""
        if self._given_up:
            return
        self.free_oldest_slot()
        os.link(saved.path, next(path for path in self._names if not path.exists()))

    def stop_keeping(self) -> bool:
        """Remove the kept states and keep no more, for lack of room. Returns whether anything was removed."""
        self._given_up = True
        held = [path for path in (*self._names, self._spare) if path.exists()]
        for path in held:
            path.unlink()
        return bool(held)

    def find_replicas(self) -> list[CompleteSlot]:
        return self._folder.find_replicas()

    def drop_newer_than(self, version: StateVersion) -> None:
        """Have the next kept state replace one that is newer than `version`, from which the world resumed."""
        found = self.slots.find_complete()
        older = [slot for slot in found if slot.header.version <= version]
        if older and len(older) < len(found):
            self.slots.keep_only_slot(older[0])

    def close(self) -> None:
        self.slots.close()
