"""The fixtures of the fast tests of masters."""

from tests.fast.master.conftest import client, create, lead, stack, url

__all__ = ["client", "create", "lead", "stack", "url"]
