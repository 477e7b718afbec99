"""Adds soft labels to a data loader's batches: the code that all frameworks share."""

from __future__ import annotations

import abc
import logging
import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from edl.distill.cache import SoftLabelCache
from edl.distill.compress import TopK
from edl.distill.options import Options
from edl.distill.padding import padded
from edl.distill.pipeline.answers import Combine
from edl.distill.pipeline.epoch import Epoch, EpochIterator
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession, open_session
from edl.distill.source.cutters import BatchCutter, Cutter, Getter, PaddedBatchCutter, Router
from edl.distill.source.iterator import Handover, SourceIterator
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError, SourceError
from edl.protocol.tensors import Array
from edl.protocol.transport import FORK_HANDLERS
from edl.settings import is_count
from edl.tokenizer_hash import resolve_tokenizer

logger = logging.getLogger("edl.distill")

B = TypeVar("B")
Inputs: TypeAlias = str | Sequence[str | None] | Mapping[str, str | int | Callable[[Any], Any]]
TeachersLike: TypeAlias = (
    str | Teachers | Sequence[str | Teachers] | Mapping[Any, str | Sequence[str] | Teachers] | None
)
Route: TypeAlias = str | int | Callable[[Any], Any] | None


class DistillLoader(Generic[B], abc.ABC):
    """Yields `(batch, soft labels)` for every batch of `loader`. Iterate it once per epoch; `close` it when done.

    Soft labels are a tensor [rows, ...] for a single output, and a tuple of tensors for several outputs, ordered by
    service and output. The arrays of `TopK` labels are tensors.

    Args:
        loader: Iterable that yields batches.
        request: The labels to request; None to train without teachers, which yields `(batch, None)`.
        device: Device to move batches and labels to before use; None to leave them where they are.
        ahead: Number of batches to read ahead in the training loop's own thread; None to read in a separate thread.
    """

    def __init__(
        self, loader: Iterable[B], request: LabelRequest | None, *, device: Any = None, ahead: int | None = None
    ) -> None:
        if FORK_HANDLERS and getattr(loader, "num_workers", False):
            logger.warning(
                "grpc was imported before edl, with its fork handlers on, which can crash the loader's workers: "
                "import edl.distill first, or set GRPC_ENABLE_FORK_SUPPORT=0"
            )
        if ahead is not None and not is_count(ahead) and (isinstance(ahead, bool) or ahead != 0):
            raise SettingsError(f"ahead={ahead!r}: must be a whole number of batches, 0 or more, or None")
        self.loader = loader
        self._request = request
        self._device = device
        self._batches_ahead = ahead
        self._session: LabelSession | None = None
        if request is None:
            logger.info("no teachers: batches have no soft labels")
            return
        open_session(request, self._keep)

    def _keep(self, session: LabelSession) -> None:
        self._session = session
        weakref.finalize(self, session.close_without_waiting).atexit = False  # the session closes itself at exit

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[B, Any]]:
        return self.label(self.loader)

    def label(self, batches: Iterable[B]) -> Iterator[tuple[B, Any]]:
        """Return an epoch over these batches instead of all batches of the loader, for example to resume an epoch."""
        session, request = self._session, self._request
        if session is None or request is None:
            return EpochIterator(self._unlabelled(SourceIterator(batches)))
        session.labeller.check()
        cutter = self._cutter(request)
        if self._batches_ahead is None:
            # The loader's workers are started here, in the caller's thread, where a fork is as safe as without EDL.
            return EpochIterator(self._ahead(self._labelled(session.begin(lambda: batches, cutter), session)))
        handover = Handover(batches)
        labelled = self._labelled(session.begin(lambda: handover, cutter, handover.close), session)
        return EpochIterator(self._read_here(SourceIterator(batches), handover, labelled))

    def _unlabelled(self, batches: Iterator[B]) -> Generator[tuple[B, Any], None, None]:
        for batch in batches:
            yield (batch if self._device is None else self._moved(batch)), None

    def _cutter(self, request: LabelRequest) -> Cutter:
        settings = request.batch_rows, request.services, request.ids, request.router
        if request.tokens is None:
            return BatchCutter(request.getters, *settings)
        cutter = PaddedBatchCutter(request.getters, request.tokens, *settings)
        cutter.whole_batches = self._batches_ahead is not None
        return cutter

    def stats(self) -> ReaderStats:
        """Return the counters so far; may be called from any thread."""
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
        """Return `labels` as the framework's tensor. It may share their memory, because nothing else uses them."""

    @abc.abstractmethod
    def move(self, value: Any, device: Any) -> Any:
        """Start moving a tensor to `device` and return the moved tensor; return any other value unchanged."""

    def _labelled(self, epoch: Epoch, session: LabelSession) -> Generator[tuple[B, Any], None, None]:
        for item, found in session.labelled(epoch):
            if item.mask is not None:
                found = [padded(value, item.mask) for value in found]
            labels = [self._tensors(value) for value in found]
            yield item.value, labels[0] if len(labels) == 1 else tuple(labels)

    def _read_here(
        self, batches: Iterator[B], handover: Handover, labelled: Generator[tuple[B, Any], None, None]
    ) -> Generator[tuple[B, Any], None, None]:
        """Read batches in the thread that iterates, equally far ahead of the labelled batches on all ranks."""
        before: deque[Any] = deque()  # reading state of each pending batch
        left = True
        try:
            while True:
                while left and len(before) <= self._batches_ahead:  # type: ignore[operator]  # it is not None
                    try:
                        handover.put(next(batches))
                        before.append(self._reading_state())
                    except StopIteration:
                        left = False
                        handover.end()
                    except Exception as exc:  # noqa: BLE001 - raised again after the batches before it
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
            labelled.close()
            self._set_reading_state(None)

    def _reading_state(self) -> Any:
        """Return the loader state that the training loop may query for the batch just read."""

    def _set_reading_state(self, state: Any) -> None:
        """Restore the state of `_reading_state` when its batch is delivered; `state` is None after the last batch."""

    def _ahead(self, batches: Iterator[tuple[B, Any]]) -> Generator[tuple[B, Any], None, None]:
        """Start moving the next batch to the device, if a device is set, before the current batch is used."""
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
            yield from waiting  # was read before the error
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


def batch_request(
    teachers: TeachersLike,
    *,
    inputs: Inputs,
    outputs: str | Sequence[str],
    discovery: str | None = None,
    route: Route = None,
    tokens: Route = None,
    tokenizer: str | os.PathLike[str] = "",
    batch_rows: int | None = None,
    combine: Combine = "each",
    top_k: int | None = None,
    temperature: float = 1.0,
    dtype: Literal["float16", "float32"] | None = None,
    version: str = "",
    cache: SoftLabelCache | None = None,
    ids: Route = None,
    dataset: str = "",
    options: Options | None = None,
) -> LabelRequest | None:
    """Return the request described by the arguments of a framework's `distill`; None without teachers."""
    if isinstance(outputs, bytes) or not isinstance(outputs, Sequence):
        raise SettingsError(f"outputs={outputs!r}: expected the name of the teachers' output, or a list of several")
    if cache is not None and ids is None:
        raise SettingsError("cache without ids: say with ids= where a batch has its ids; labels are cached by id")
    unasked = no_teachers(teachers)
    groups, router = ([], None) if unasked else resolve_routes(teachers, route, discovery, optional=cache is not None)
    request = LabelRequest(
        output_spec=OutputSpec(
            (outputs,) if isinstance(outputs, str) else tuple(outputs),
            top_k=top_k,
            temperature=temperature,
            dtype=dtype,
            version=version,
            tokenizer=resolve_tokenizer(os.fspath(tokenizer)),
        ),
        teachers=groups,
        options=options or Options(),
        cache=cache,
        dataset=dataset,
        router=router,
        combine=combine,
        getters=input_getters(inputs),
        batch_rows=batch_rows,
        ids=field_getter(ids) if cache is not None and ids is not None else None,
        tokens=field_getter(tokens) if tokens is not None else None,
    )
    return None if unasked else request


def no_teachers(teachers: TeachersLike) -> bool:
    """Return whether `teachers` is an empty list, that is, no teachers. None means those in the environment."""
    return isinstance(teachers, Sequence | Mapping) and not isinstance(teachers, str) and not teachers


def resolve_teachers(teachers: TeachersLike, discovery: str | None = None, *, optional: bool = False) -> list[Teachers]:
    """Return the services that `teachers` specifies, in any of its forms."""
    if teachers is None:
        return teachers_from_env(optional=optional)
    if isinstance(teachers, Mapping):
        raise SettingsError("teachers is a mapping by field value: name the field with route=")
    if isinstance(teachers, str | Teachers):
        return [Teachers.parse(teachers, discovery=discovery)]
    parts: list[Any] = list(teachers) if isinstance(teachers, Iterable) else [teachers]
    if not all(isinstance(part, str | Teachers) for part in parts):
        raise SettingsError(
            f"teachers={teachers!r}: expected a service's name, host:port of each teacher, or a list of Teachers"
        )
    names = [part for part in parts if isinstance(part, str) and part.strip()]
    parts = [part for part in parts if isinstance(part, Teachers) or part in names]
    addresses = [name for name in names if ":" in name]
    if not parts or (addresses == parts):
        return [Teachers.parse(names, discovery=discovery)]
    if addresses:
        raise SettingsError(
            f"teachers={teachers!r}: {addresses[0]!r} is an address, but others are services: for an ensemble, pass "
            f"Teachers(endpoints=({addresses[0]!r},))"
        )
    return [Teachers.parse(part, discovery=discovery) for part in parts]


def resolve_routes(
    teachers: TeachersLike, route: Route, discovery: str | None = None, *, optional: bool = False
) -> tuple[list[Teachers], Router | None]:
    """Return the services in `teachers`, and the router that selects a service by the value of `route`."""
    if route is None:
        return resolve_teachers(teachers, discovery, optional=optional), None
    if not isinstance(teachers, Mapping) or not teachers:
        raise SettingsError(
            f"route={route!r} needs the teachers for each value, such as teachers={{'math': 'math-teacher', None: "
            f"'general'}}, not {teachers!r}"
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
    return groups, Router(field_getter(route), routes)


def input_getters(inputs: Inputs, argument: str = "inputs") -> dict[str, Getter]:
    """Return, for each input name, the function that finds the input in a batch."""
    if isinstance(inputs, str):
        inputs = {inputs: lambda batch: batch[0] if isinstance(batch, tuple | list) else batch}
    found: dict[str, Getter] = {}
    if isinstance(inputs, Mapping):
        found = {name: field_getter(key) for name, key in inputs.items()}
    elif isinstance(inputs, Sequence):
        found = {name: _part_getter(at, len(inputs)) for at, name in enumerate(inputs) if name is not None}
        if len(found) + list(inputs).count(None) < len(inputs):
            raise SettingsError(f"{argument}={inputs!r}: a name appears twice; each teacher input is one field")
    if not found or not all(isinstance(name, str) and name for name in found):
        raise SettingsError(
            f'{argument}={inputs!r}: name at least one input of the teachers, such as "image", '
            '["image", None] or {"image": 0}; use None for a field that is not sent'
        )
    return found


def _part_getter(index: int, count: int) -> Getter:
    def get(value: Any) -> Any:
        if index + 1 < count and hasattr(value, "__len__") and len(value) < count:
            found = f"{len(value)} of the {count} named fields"
            raise SourceError(f"a sample or batch of the source has only {found} (None counts as a name)")
        return value[index]

    return get


def field_getter(key: str | int | Getter) -> Getter:
    """Return a function that finds the field at `key`; if `key` is such a function, return it."""
    return key if callable(key) else operator.itemgetter(key)
