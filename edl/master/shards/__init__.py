"""Shard ownership of data sets: a book that only commands change, so that replaying them rebuilds it.

What does not belong here: clocks, threads, sockets, files, and the contents of a shard's units (`edl.datasets`). A
server decides what has expired, and issues a command for it; a journal keeps the commands (`edl.master.journal`).
"""

from __future__ import annotations

from edl.master.shards.book import ShardBook

__all__ = ["ShardBook"]
