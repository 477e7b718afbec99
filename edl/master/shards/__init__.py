"""Which shard of a data set is whose: a book that nothing but commands changes, and that replaying them makes again.

What does not belong here: clocks, threads, sockets, files, and what a shard's units are (`edl.datasets`). A
server decides what has expired, and says so in a command; a journal keeps the commands (`edl.master.journal`).
"""

from __future__ import annotations

from edl.master.shards.book import ShardBook

__all__ = ["ShardBook"]
