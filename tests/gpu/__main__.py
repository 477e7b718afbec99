"""Runs the GPU checks: `python -m tests.gpu`; arguments are pytest's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent), "-v", "--durations=0", *sys.argv[1:]]))
