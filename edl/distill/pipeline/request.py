"""`LabelRequest`: the labels to request and the teachers to ask. Readers pass it down to connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edl.distill.cache import SoftLabelCache
from edl.distill.options import Options
from edl.distill.pipeline.answers import Combine, Combiner
from edl.distill.source.cutters import Getter, Router
from edl.distill.teachers import Teachers
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError
from edl.settings import is_count


@dataclass(frozen=True)
class LabelRequest:
    """The settings of a reader or loader. Raises `SettingsError` for values that cannot be combined."""

    output_spec: OutputSpec
    teachers: list[Teachers]  # a group for each service; if empty, the cache must have all labels
    options: Options = field(default_factory=Options)
    cache: SoftLabelCache | None = None
    dataset: str = ""  # the data set that ids in the cache refer to; see `CacheKey`
    router: Router | None = None  # which service labels which rows; None if all services label everything
    combine: Combine = "each"  # see `Combiner`
    getters: Mapping[str, Getter] = field(default_factory=dict)  # finds each input, by name, in a sample or batch
    batch_rows: int | None = None  # rows per request; None for a suitable default
    ids: Getter | None = None  # finds the sample ids; None without a cache
    tokens: Getter | None = None  # for batches of padded sequences, finds the token mask

    def __post_init__(self) -> None:
        if self.batch_rows is not None and not is_count(self.batch_rows):
            words = "must be a whole number of at least 1, or None"
            raise SettingsError(f"batch_rows (DistillReader's teacher_batch_size)={self.batch_rows!r}: {words}")
        if self.cache is not None and not isinstance(self.cache, SoftLabelCache):
            raise SettingsError(
                f"cache={self.cache!r}: expected an edl.distill.cache.SoftLabelCache, such as SoftLabelCache(path=...)"
            )
        Combiner(self.combine, [1.0])  # raises if `combine` is invalid
        if self.router is not None and self.combine != "each":
            raise SettingsError(
                f"combine={self.combine!r} and route=: each row is labelled by one service, so omit combine"
            )

    @property
    def routes(self) -> Mapping[Any, int] | None:
        """The number of the service for each value of the routing field; None without routes."""
        return self.router.routes if self.router is not None else None

    @property
    def services(self) -> int:
        return 1 if self.router is not None else max(len(self.teachers), 1)

    def combiner(self) -> Combiner:
        return Combiner(self.combine, [group.weight for group in self.teachers] or [1.0])
