"""Run `edl serve` and the other commands as `python -m edl_serving serve ...`."""

from __future__ import annotations

import sys

from edl.cli import main

if __name__ == "__main__":
    sys.exit(main())
