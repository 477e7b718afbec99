"""`LabelRequest`: what a student asks for, and of whom. It goes as one from a reader or loader down to connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edl.distill.options import Options
from edl.distill.pipeline.answers import Combine, Combiner
from edl.distill.pipeline.label_cache import CacheConfig
from edl.distill.source.cutters import Getter
from edl.distill.source.routes import Router
from edl.distill.teachers import Teachers
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError
from edl.settings import is_count

__all__ = ["LabelRequest"]


@dataclass(frozen=True)
class LabelRequest:
    """What is asked for. Raises `SettingsError` for values that do not go together."""

    output_spec: OutputSpec
    teachers: list[Teachers]  # a group for each service; none: the cache must have all labels
    options: Options = field(default_factory=Options)
    cache_config: CacheConfig | None = None
    router: Router | None = None  # which service labels what; None: all services label everything
    combine: Combine = "each"  # see `Combiner`
    getters: Mapping[str, Getter] = field(default_factory=dict)  # by input name, how to find it in a sample or batch
    batch_rows: int | None = None  # rows of a request; None: as many as is good
    ids: Getter | None = None  # how to find the sample ids; None without a cache
    tokens: Getter | None = None  # of batches of padded sequences, how to find the mask of what is a token

    def __post_init__(self) -> None:
        if self.batch_rows is not None and not is_count(self.batch_rows):
            raise SettingsError(f"batch_rows={self.batch_rows!r}: must be a whole number of at least 1, or None")
        Combiner(self.combine, [1.0])  # says what is wrong with `combine`
        if self.router is not None and self.combine != "each":
            raise SettingsError(
                f"combine={self.combine!r} and route=: each row is labelled by one service, so leave combine out"
            )

    @property
    def routes(self) -> Mapping[Any, int] | None:
        """By value of the field that says which service labels what, the service's number."""
        return self.router.routes if self.router is not None else None

    @property
    def services(self) -> int:
        """How many answers a row gets."""
        return 1 if self.router is not None else max(len(self.teachers), 1)

    def combiner(self) -> Combiner:
        """Return what makes one value of the services' answers."""
        return Combiner(self.combine, [group.weight for group in self.teachers] or [1.0])
