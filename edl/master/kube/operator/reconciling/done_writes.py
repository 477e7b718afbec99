"""`DoneWrites`: objects beside pods that are as they should be, so that a look at rest writes nothing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

from edl.kube.resource_types import ResourceType

__all__ = ["DoneWrites"]

_KEPT_S: Final = 900.0
"""After which an object is written again: a disruption budget that somebody removed is back by then."""
_MOST: Final = 10_000
"""Objects that are remembered, some per resource."""


class DoneWrites:
    """Remembers what was written last, for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: OrderedDict[tuple[str, str, str], tuple[str, float]] = OrderedDict()

    def is_new(self, owner_uid: str, kind: ResourceType, name: str, text: str) -> bool:
        """Whether an object has to be written.

        `text` is what is to be written; empty for a removal.
        """
        with self._lock:
            before, written_s = self._written.get((owner_uid, kind.plural, name), (None, 0.0))
        return before != text or time.monotonic() - written_s > _KEPT_S

    def note(self, owner_uid: str, kind: ResourceType, name: str, text: str) -> None:
        """Note that an object was written."""
        with self._lock:
            self._written[owner_uid, kind.plural, name] = text, time.monotonic()
            self._written.move_to_end((owner_uid, kind.plural, name))
            while len(self._written) > _MOST:
                self._written.popitem(last=False)
