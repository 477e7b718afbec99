"""Fixtures of the fast tests of teacher servers."""

from tests.fast.serving.conftest import inside

__all__ = ["inside"]
