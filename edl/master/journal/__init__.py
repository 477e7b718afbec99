"""What a master has decided, where it outlives the master: records in order, and a snapshot in place of older ones.

What does not belong here: what the bytes mean (`edl.master.shards`), who may lead, and when a snapshot is due.
"""

from __future__ import annotations

from edl.master.journal.journal import Journal
from edl.master.journal.opening import open_journal

__all__ = ["Journal", "open_journal"]
