"""The import path under which users find `Policy`: `from edl.distill.actions import Policy`."""

from __future__ import annotations

from edl.distill.dispatch.policy import Policy

__all__ = ["Policy"]
