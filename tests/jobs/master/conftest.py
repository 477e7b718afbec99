"""The fixtures of the fast tests of masters."""

from tests.fast.master.conftest import client, create

__all__ = ["client", "create"]
