"""Tables whose files say where their rows are: nothing but footers is read before the rows themselves.

What does not belong here: CSV, which is text (`edl.master.datasets.text`).
"""

from __future__ import annotations

from edl.master.datasets.tables.parquet import ParquetDataset

__all__ = ["ParquetDataset"]
