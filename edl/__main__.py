"""Run `edl` as `python -m edl`."""

from __future__ import annotations

import sys

from edl.cli import main

if __name__ == "__main__":
    sys.exit(main())
