"""EDL makes soft labels on idle GPUs.

Subpackages, from the bottom up (a layer imports only those before it; `import-linter` holds this):

- `edl.errors`, `edl.settings`, `edl.protocol`: the leaves.
- `edl.discovery`: who is live.
- `edl.distill`: soft labels into a training loop.
- `edl.cli`: the command line.

The teacher server is a package of its own, `edl_serving`, and `edl` never imports it.
What does not belong here: code. Importing `edl` must stay free of heavy imports.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
