"""EDL turns idle GPUs into soft labels.

docs/architecture.md lists the subpackages. Put no code here: importing `edl` must stay free of heavy imports.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
