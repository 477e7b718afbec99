"""The fixtures of the fast tests of the same area."""

from tests.fast.master.conftest import client, create, lead, read, stack, url

__all__ = ["client", "create", "lead", "read", "stack", "url"]
