"""The fixtures of the fast tests of the same area."""

from tests.fast.serving.gateway.conftest import engine, gateways

__all__ = ["engine", "gateways"]
