"""Soft labels into a training loop.

`DistillReader` is the reader for any framework; `edl.distill.torch.distill` wraps a PyTorch `DataLoader`. Inside:

- `teachers` finds teachers, `link` and `client` talk to one, `links` and `engine` to all of a service;
- `dispatch`, `window` and `outage` decide, purely, what goes where and when, and how long work waits;
- `source` cuts the user's data into requests, `epoch` and `labeller` run them, `delivery` puts the answers together;
- `cache`, `compress` and `losses` keep, shrink and use soft labels.

What does not belong here: serving a model, and training loops.
"""

from __future__ import annotations

from edl.distill.labeller import Options
from edl.distill.reader import DistillReader
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers
from edl.settings import Credentials

__all__ = ["Credentials", "DistillReader", "Options", "ReaderStats", "Teachers"]
