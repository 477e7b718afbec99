"""Feeds soft labels into a training loop.

`DistillReader` is the reader for any framework; `edl.distill.torch.distill` wraps a PyTorch `DataLoader`. Modules:

- `scoring` labels sequences call by call, for loops in which the student generates them;
- `pipeline` moves data from its source to the training loop: it reads ahead, requests labels, delivers in order;
- `source` cuts the user's data into requests, and checks that the data do not change meanwhile;
- `engine` runs the requests of one service on the event loop; `dispatch` decides, without I/O, what goes where;
- `transport` sends one request to one teacher; `teachers` names teachers and watches them through discovery;
- `cache`, `compress` and `losses` keep, shrink and use soft labels; `labelling` fills a cache ahead of time.

What does not belong here: serving a model, and training loops.
"""

from __future__ import annotations

from edl.distill.compress import TopK
from edl.distill.options import Options, Policy
from edl.distill.reader import DistillReader
from edl.distill.scoring import Scorer, on_policy
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers
from edl.settings import Credentials

__all__ = [
    "Credentials",
    "DistillReader",
    "Options",
    "Policy",
    "ReaderStats",
    "Scorer",
    "Teachers",
    "TopK",
    "on_policy",
]
