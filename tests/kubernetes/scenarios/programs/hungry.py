"""A training script that needs as many MiB as it is told, at once."""

from __future__ import annotations

import sys

block = bytearray(int(sys.argv[1]) << 20)
for page in range(0, len(block), 4096):
    block[page] = 1
print(f"had {len(block) >> 20} MiB")
