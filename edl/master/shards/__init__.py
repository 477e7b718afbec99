"""Shard ownership of data sets: a book that only commands change, so that replaying them rebuilds it."""

from __future__ import annotations

from edl.master.shards.book import ShardBook

__all__ = ["ShardBook"]
