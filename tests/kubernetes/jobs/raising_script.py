"""A training script with a bug."""

from __future__ import annotations


def read_column(table: dict[str, list[float]], name: str) -> list[float]:
    if name not in table:
        raise ValueError(f"no such column: {name}")
    return table[name]


read_column({"x": [1.0]}, "label")
