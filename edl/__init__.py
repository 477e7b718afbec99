"""EDL turns idle GPUs into soft labels.

Subpackages, from the bottom up (a layer imports only those before it; `import-linter` enforces this):

- `edl.errors`, `edl.settings`, `edl.protocol`: the leaves.
- `edl.discovery`: which teachers are live.
- `edl.distill`: brings soft labels into a training loop.
- `edl.cli`: the command line.

The teacher server is a separate package, `edl_serving`, which `edl` never imports.
Put no code here: importing `edl` must stay free of heavy imports.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
