"""What to ask teachers for, how far it is, and what was done."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.distill.cache import CacheKey
from edl.distill.options import Options
from edl.distill.teachers import Teachers
from edl.distill.transport.schema import OutputSpec

__all__ = ["LabelPlan", "LabelProgress", "LabelReport"]


@dataclass(frozen=True)
class LabelPlan:
    """What to ask teachers for.

    Attributes:
        teachers: whom to ask.
        output_spec: what to ask for.
        dataset: the tag of `CacheKey`; a reader must use the same tag.
        batch_rows: rows of a request.
        options: deadlines, memory, retries.
    """

    teachers: Teachers
    output_spec: OutputSpec
    dataset: str = ""
    batch_rows: int = 32
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class LabelProgress:
    """How far the labelling is.

    Attributes:
        total: rows of the data set, None if unknown.
        known: rows that had a label already.
        labelled: rows that got a label.
        seconds: since the first request.
        teachers_live: teachers that may be given work.
    """

    total: int | None = None
    known: int = 0
    labelled: int = 0
    seconds: float = 0.0
    teachers_live: int = 0

    @property
    def rows_per_s(self) -> float:
        """Rows labelled a second."""
        return self.labelled / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class LabelReport:
    """What a finished labelling has done.

    Attributes:
        key: what the labels are kept under.
        progress: at the end.
    """

    key: CacheKey
    progress: LabelProgress
