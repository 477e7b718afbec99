"""`ElasticLightningCallback`, which is defined in `edl.collective.integrations.lightning`."""

from __future__ import annotations

from edl.collective.integrations.lightning import ElasticLightningCallback

__all__ = ["ElasticLightningCallback"]
