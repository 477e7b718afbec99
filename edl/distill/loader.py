"""Puts soft labels beside a data loader's batches: what is the same for every framework."""

from __future__ import annotations

import abc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from edl.distill.compress import TopK
from edl.distill.options import Options
from edl.distill.padding import padded
from edl.distill.pipeline.answers import Combine, Combiner, item_outputs, values_by_name
from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.pipeline.epoch import Epoch, EpochIterator
from edl.distill.pipeline.label_cache import CacheConfig
from edl.distill.pipeline.session import LabelSession
from edl.distill.source.chunk import Item
from edl.distill.source.cutters import BatchCutter, Cutter, Getter
from edl.distill.source.iterator import Handover, SourceIterator
from edl.distill.source.routes import Router, routed_cutter
from edl.distill.source.sequence_cutters import PaddedBatchCutter
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import Outputs, OutputSpec
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.protocol.transport import FORK_HANDLERS
from edl.settings import is_count

__all__ = [
    "DistillLoader",
    "Inputs",
    "TeachersLike",
    "field_getter",
    "input_getters",
    "no_teachers",
    "Route",
    "check_routed_combine",
    "resolve_routes",
    "resolve_services",
    "resolve_teachers",
    "output_names",
]

logger = logging.getLogger("edl.distill")

B = TypeVar("B")
Inputs: TypeAlias = str | Sequence[str | None] | Mapping[str, str | int | Callable[[Any], Any]]
TeachersLike: TypeAlias = (
    str | Sequence[str] | Teachers | Sequence[Teachers] | Mapping[Any, str | Sequence[str] | Teachers] | None
)
Route: TypeAlias = str | int | Callable[[Any], Any] | None


class DistillLoader(Generic[B], abc.ABC):
    """Yields `(batch, soft labels)` for every batch of `loader`. Iterate it once an epoch; `close` it when done.

    Soft labels are a tensor [rows, ...] for a single output, and a tuple for several: outputs by service. Of `TopK`
    labels the arrays are tensors.

    Args:
        teachers: the services to ask; None to ask nobody, and yield `(batch, None)`.
        batch_rows: rows of a request; None for the whole batch, see `edl.distill.torch.distill`.
        device: where to move batches and labels ahead of use; None to leave them.
        cache_config: the soft-label cache, None without.
        tokens: of batches of padded sequences, how to find the mask of what is a token; None for batches of rows.
        ahead: batches that are read ahead in the training loop's own thread; None to read in another thread.
        router: which service labels what, by a field of the batch; None where all of them label everything.
    """

    def __init__(
        self,
        loader: Iterable[B],
        teachers: list[Teachers] | None,
        *,
        getters: Mapping[str, Getter],
        output_spec: OutputSpec,
        batch_rows: int | None,
        combine: Combine,
        device: Any,
        options: Options,
        cache_config: CacheConfig | None = None,
        ids: Getter | None = None,
        tokens: Getter | None = None,
        ahead: int | None = None,
        router: Router | None = None,
    ) -> None:
        if FORK_HANDLERS and getattr(loader, "num_workers", False):
            logger.warning(
                "grpc was imported before edl, with its fork handlers on, which can crash the loader's workers: "
                "import edl.distill first, or set GRPC_ENABLE_FORK_SUPPORT=0"
            )
        if batch_rows is not None and not is_count(batch_rows):
            raise SettingsError(f"batch_rows={batch_rows!r}: must be a whole number of at least 1, or None")
        if ahead is not None and not is_count(ahead) and (isinstance(ahead, bool) or ahead != 0):
            raise SettingsError(f"ahead={ahead!r}: must be a whole number of batches, 0 or more, or None")
        self.loader = loader
        self._batches_ahead = ahead
        self._getters = getters
        self._batch_rows = batch_rows
        self._device = device
        self._outputs = output_spec.outputs
        check_routed_combine(router, combine)
        self._router = router
        self._combiner = Combiner(combine, [group.weight for group in teachers or ()] or [1.0])
        if cache_config is not None and ids is None:
            raise SettingsError(
                "cache without ids: say where the samples' ids are in a batch, by which it finds labels"
            )
        self._ids = ids if cache_config is not None else None
        self._tokens = tokens
        routes = router.routes if router is not None else None
        self._session: LabelSession | None = None
        if teachers is None:
            logger.info("no teachers: batches come without soft labels")
            return
        self._session = LabelSession(teachers, output_spec, options, cache_config, routes)
        weakref.finalize(self, self._session.close_without_waiting).atexit = False  # the session sees to that

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[B, Any]]:
        return self.label(self.loader)

    def label(self, batches: Iterable[B]) -> Iterator[tuple[B, Any]]:
        """Return an epoch over other batches than all of the loader's: what is left of an epoch, for example."""
        session = self._session
        if session is None:
            return EpochIterator(self._unlabelled(iter(batches)))
        session.labeller.check()
        labeller = session.labeller
        cutter = (
            self._cutter(labeller)
            if self._router is None
            else routed_cutter(self._router, partial(self._cutter, labeller))
        )
        if self._batches_ahead is None:
            # The loader's workers are started here, in the caller's thread, where a fork is as safe as without EDL.
            return EpochIterator(self._ahead(self._labelled(session.begin(lambda: batches, cutter), labeller)))
        handover = Handover()
        labelled = self._labelled(session.begin(lambda: handover, cutter, handover.close), labeller)
        return EpochIterator(self._read_here(SourceIterator(batches), handover, labelled))

    def _unlabelled(self, batches: Iterator[B]) -> Generator[tuple[B, Any], None, None]:
        for batch in batches:
            yield (batch if self._device is None else self._moved(batch)), None

    def _cutter(self, labeller: ChunkLabeller) -> Cutter:
        services = labeller.services
        if self._tokens is None:
            return BatchCutter(self._getters, self._batch_rows, services, self._ids)
        cutter = PaddedBatchCutter(self._getters, self._tokens, self._batch_rows, services, self._ids)
        cutter.whole_batches = self._batches_ahead is not None
        return cutter

    def stats(self) -> ReaderStats:
        """Return what has been done so far; may be called from any thread."""
        return self._session.stats() if self._session is not None else ReaderStats()

    def close(self) -> None:
        """End the epoch and all connections."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> DistillLoader[B]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def to_tensor(self, labels: Array) -> Any:
        """Return a tensor of the framework that may share memory with `labels`, which is used nowhere else."""

    @abc.abstractmethod
    def move(self, value: Any, device: Any) -> Any:
        """Return a tensor on its way to `device`; any other value as it is."""

    def _labelled(self, epoch: Epoch, labeller: ChunkLabeller) -> Iterator[tuple[B, Any]]:
        try:
            for item in epoch:
                combined = self._combiner(
                    [_outputs_of(labeller, item, service) for service in range(labeller.services)]
                )
                epoch.taken(item)
                found = [value for outputs in combined for value in values_by_name(outputs, self._outputs)]
                if item.mask is not None:
                    found = [padded(value, item.mask) for value in found]
                labels = [self._tensors(value) for value in found]
                yield item.value, labels[0] if len(labels) == 1 else tuple(labels)
        finally:
            epoch.close()

    def _read_here(
        self, batches: Iterator[B], handover: Handover, labelled: Iterator[tuple[B, Any]]
    ) -> Generator[tuple[B, Any], None, None]:
        """Read batches in the thread that asks for them, as many ahead of the labelled ones on all ranks alike."""
        before: deque[Any] = deque()  # what each batch under way was read in
        left = True
        try:
            while True:
                while left and len(before) <= self._batches_ahead:  # type: ignore[operator]  # it is no None
                    try:
                        handover.put(next(batches))
                        before.append(self._reading_state())
                    except StopIteration:
                        left = False
                        handover.end()
                    except Exception as exc:  # noqa: BLE001 - raised again behind the batches that came before it
                        left = False
                        handover.end(exc)
                try:
                    batch = next(labelled)
                except StopIteration:
                    return
                self._set_reading_state(before.popleft())
                yield batch if self._device is None else self._moved(batch)
        finally:
            handover.close()
            labelled.close()  # type: ignore[attr-defined]  # a generator
            self._set_reading_state(None)

    def _reading_state(self) -> Any:
        """Return what the loop around may ask the loader about the batch that was just read."""

    def _set_reading_state(self, state: Any) -> None:
        """Have the loop around find that again, as the batch is delivered; None behind the last."""

    def _ahead(self, batches: Iterator[tuple[B, Any]]) -> Generator[tuple[B, Any], None, None]:
        """Start moving the next batch to the device, if there is one, before the present batch is used."""
        if self._device is None:
            yield from batches
            return
        waiting: deque[tuple[B, Any]] = deque()
        try:
            for batch in batches:
                waiting.append(self._moved(batch))
                if len(waiting) > 1:
                    yield waiting.popleft()
        except Exception:
            yield from waiting  # came before the error
            raise
        yield from waiting

    def _tensors(self, labels: Array | TopK) -> Any:
        if isinstance(labels, TopK):
            return labels.map(lambda array: self.to_tensor(array.copy()))
        return self.to_tensor(labels)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, TopK):
            return value.map(lambda tensor: self.move(tensor, self._device))
        if isinstance(value, Mapping):
            return {key: self._moved(part) for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._moved(part) for part in value))
        if isinstance(value, tuple | list):
            return type(value)(self._moved(part) for part in value)
        return self.move(value, self._device)


def _outputs_of(labeller: ChunkLabeller, item: Item, service: int) -> Outputs:
    if not item.parts:  # a batch whose texts are all empty
        return labeller.empty_outputs(service)
    outputs = item_outputs(item, service)
    if item.mask is not None:
        labeller.note_outputs(service, outputs)
    return outputs


def no_teachers(teachers: TeachersLike) -> bool:
    """Return whether a program trains without teachers, which an empty list says: None is what the environment says."""
    return isinstance(teachers, Sequence | Mapping) and not isinstance(teachers, str) and not teachers


def resolve_teachers(teachers: TeachersLike, discovery: str | None = None, *, optional: bool = False) -> list[Teachers]:
    """Return the services that `teachers` names, in whichever way.

    Raises:
        SettingsError: it names none, or in a way that is not known.
    """
    if teachers is None:
        return teachers_from_env(optional=optional)
    if isinstance(teachers, Mapping):
        raise SettingsError("teachers by the value of a field, and no field: name it with route=")
    if isinstance(teachers, str | Teachers):
        return [Teachers.parse(teachers, discovery=discovery)]
    parts = list(teachers) if isinstance(teachers, Iterable) else [teachers]
    groups = [part for part in parts if isinstance(part, Teachers)]
    names = [part for part in parts if isinstance(part, str)]
    if groups and len(groups) == len(parts):
        return groups
    if len(names) < len(parts):
        raise SettingsError(
            f"teachers={teachers!r}: expected a service's name, host:port of each teacher, or a list of Teachers"
        )
    return [Teachers.parse(names, discovery=discovery)]


def resolve_routes(
    teachers: TeachersLike, route: Route, discovery: str | None = None, *, optional: bool = False
) -> tuple[list[Teachers], Router | None]:
    """Return the services that `teachers` names, and which of them labels what.

    `route`: where in a sample or batch the value is that `teachers` has as a key; None where all label everything.

    Raises:
        SettingsError: it names none, or in a way that is not known.
    """
    if route is None:
        return resolve_teachers(teachers, discovery, optional=optional), None
    if not isinstance(teachers, Mapping) or not teachers:
        raise SettingsError(
            f"route={route!r} needs the teachers of each value, such as teachers={{'math': 'math-teacher', None: "
            f"'general'}}, and they are {teachers!r}"
        )
    groups: list[Teachers] = []
    routes: dict[Any, int] = {}
    for value, named in teachers.items():
        if not isinstance(named, str | Teachers) and not (
            isinstance(named, Sequence) and all(isinstance(part, str) for part in named)
        ):
            raise SettingsError(
                f"teachers[{value!r}]={named!r}: expected a service's name, host:port of each teacher, or Teachers; an "
                "ensemble cannot be one of several routes"
            )
        group = Teachers.parse(named, discovery=discovery)
        if group not in groups:
            groups.append(group)
        routes[value] = groups.index(group)
    return groups, Router(route if callable(route) else field_getter(route), routes)


def resolve_services(
    teachers: TeachersLike, route: Route, discovery: str | None = None, *, optional: bool = False
) -> tuple[list[Teachers] | None, Router | None]:
    """Return what `resolve_routes` returns, or None for the services where a program trains without teachers.

    Raises:
        SettingsError: it names none, or in a way that is not known.
    """
    if no_teachers(teachers):
        return None, None
    return resolve_routes(teachers, route, discovery, optional=optional)


def check_routed_combine(router: Router | None, combine: Combine) -> None:
    """Raise a `SettingsError` where answers are to be combined and there is only one of each row."""
    if router is not None and combine != "each":
        raise SettingsError(
            f"combine={combine!r} and route=: each row is labelled by one service, so leave combine out"
        )


def output_names(outputs: str | Sequence[str]) -> tuple[str, ...]:
    """Return the outputs' names as a tuple."""
    if isinstance(outputs, str):
        return (outputs,)
    if isinstance(outputs, bytes) or not isinstance(outputs, Sequence):
        raise SettingsError(f"outputs={outputs!r}: expected the name of the teachers' output, or a list of several")
    return tuple(outputs)


def input_getters(inputs: Inputs) -> dict[str, Getter]:
    """Return by input name how to find it in a batch.

    Raises:
        SettingsError: it names no input.
    """
    if isinstance(inputs, str):
        return {inputs: lambda batch: batch[0] if isinstance(batch, tuple | list) else batch}
    if isinstance(inputs, Mapping):
        return {name: key if callable(key) else field_getter(key) for name, key in inputs.items()}
    found: dict[str, Getter] = {}
    if isinstance(inputs, Sequence):
        found = {name: field_getter(index) for index, name in enumerate(inputs) if isinstance(name, str) and name}
    if not found:
        raise SettingsError(
            f'inputs={inputs!r}: name at least one input of the teachers, as in "image", '
            '["image", None] or {"image": 0}'
        )
    return found


def field_getter(key: str | int) -> Getter:
    """Return a function that finds the field at `key`."""
    return lambda batch: batch[key]
