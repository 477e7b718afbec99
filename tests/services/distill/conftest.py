"""The fixtures of the fast tests of the same area."""

from tests.fast.distill.conftest import registry_url, start

__all__ = ["registry_url", "start"]
