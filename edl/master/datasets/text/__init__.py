"""Text that is cut at the ends of lines or records: where shards begin is found in a single pass, and kept as an index.

What does not belong here: files (`edl.master.datasets.storage`), and text that is in the columns of a table.
"""

from __future__ import annotations

from edl.master.datasets.text.files import TextOptions, TextProgress
from edl.master.datasets.text.lines import LinesDataset
from edl.master.datasets.text.records import RecordsDataset

__all__ = ["LinesDataset", "RecordsDataset", "TextOptions", "TextProgress"]
