"""`ElasticLoop`, which is defined in `edl.collective.integrations.accelerate`."""

from __future__ import annotations

from edl.collective.integrations.accelerate import ElasticLoop

__all__ = ["ElasticLoop"]
