"""`ElasticCallback`, which is defined in `edl.collective.integrations.transformers`."""

from __future__ import annotations

from edl.collective.integrations.transformers import ElasticCallback

__all__ = ["ElasticCallback"]
