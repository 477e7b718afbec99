"""The fixtures of the fast tests of the same area."""

from tests.fast.discovery.conformance.conftest import _nothing_stays_open, folder, service

__all__ = ["_nothing_stays_open", "folder", "service"]
