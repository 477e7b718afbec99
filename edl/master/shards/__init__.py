"""Shard ownership of data sets: a book that only commands change, so that replaying the commands rebuilds the book."""

from __future__ import annotations

from edl.master.shards.book import ShardBook

__all__ = ["ShardBook"]
