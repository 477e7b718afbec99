"""`ElasticCallback` and `ElasticDataset`, which are defined in `edl.collective.integrations.keras`."""

from __future__ import annotations

from edl.collective.integrations.keras import ElasticCallback, ElasticDataset

__all__ = ["ElasticCallback", "ElasticDataset"]
