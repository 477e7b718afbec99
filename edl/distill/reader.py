"""`DistillReader`, compatible with PaddlePaddle EDL 0.3's class, so that existing programs continue to work."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from typing_extensions import Self

from edl.distill.cache import SoftLabelCache
from edl.distill.loader import TeachersLike, field_getter, input_getters, resolve_routes
from edl.distill.options import Options
from edl.distill.pipeline.answers import Combine, copied
from edl.distill.pipeline.epoch import Epoch, EpochIterator
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession, open_session
from edl.distill.source.chunk import Item
from edl.distill.source.cutters import (
    BatchCutter,
    Cutter,
    Router,
    SampleCutter,
    SampleListCutter,
    SequenceCutter,
    SequenceListCutter,
)
from edl.distill.stats import ReaderStats
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import OutputSpec
from edl.errors import ClosedError, SettingsError, SourceError
from edl.quoting import listed
from edl.settings import is_count
from edl.tokenizer_hash import resolve_tokenizer

_Kind: TypeAlias = Literal["sample", "sample_list", "batch", "sequence", "sequence_list"]


class DistillReader:
    """Adds teachers' predictions to the values that a data source yields.

    ::

        reader = DistillReader(ins=["image", None], predicts=["logits"])   # (image, label) samples; label is not sent
        reader.set_dynamic_teacher("consul://10.0.0.1:8500", "resnet-teacher")
        reader.set_batch_generator(batches)
        for image, label, logits in reader():
            ...

    The source runs in a background thread, ahead of the training loop. Its values are passed on uncopied, so it must
    yield new arrays every time and not reuse a buffer.

    Setters return this reader. They raise `SettingsError` if a value is invalid, if the source or the teachers have
    already been set, or if the first epoch has started.

    Args:
        ins: For each field of a sample, the name of the teachers' input, or None for a field that only passes through.
            Further fields pass through too. A field is not sent if the teachers' model has no input of that name. A
            sample with fewer fields raises `SourceError`.
        predicts: Names of the teachers' outputs, which are appended to the fields.
        teachers: Alternative to `set_fixed_teacher` and `set_dynamic_teacher`: a service's name, endpoints, `Teachers`,
            or a list of `Teachers` for an ensemble.
        teacher_batch_size: Rows per request; see `set_teacher_batch_size`.
        route: Position of the field whose value selects a sample's teachers, or a function of the sample; a batch has
            one value per row, or a single value for all rows. `teachers` is then a mapping from each value to a
            service, endpoints or `Teachers`; the key None applies to all other values.
        combine: How to combine an ensemble's answers; see `edl.distill.pipeline.answers.Combiner`. With "each" the
            predictions of all services follow one another, in the order of `teachers`.
        top_k: Number k of the largest logits per row to deliver, as `TopK`; None for whole outputs.
        temperature: Temperature at which the mass of the tail is computed, with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None for the model's own type.
        version: Use only labels of this model version; empty for any.
        tokenizer: Path of the student's tokenizer (a tokenizer.json, or a model's folder), or its hash. Teachers with a
            different tokenizer are not used. Empty for any.
        cache: Cache of soft labels: samples seen before are not sent to teachers again. If the cache has all labels,
            you need not specify teachers.
        id_field: Position of the field that holds a sample's id (an integer or a string); used only with a cache.
        dataset: With a cache: tag for what the ids mean; see `edl.distill.cache.CacheKey`.
        options: Deadlines, memory and hedging; see `Options`.

    Raises:
        SettingsError: An argument is invalid.
    """

    def __init__(
        self,
        ins: Sequence[str | None],
        predicts: Sequence[str],
        *,
        teachers: TeachersLike = None,
        teacher_batch_size: int | None = None,
        route: int | Callable[[Any], Any] | None = None,
        combine: Combine = "each",
        top_k: int | None = None,
        temperature: float = 1.0,
        dtype: Literal["float16", "float32"] | None = None,
        version: str = "",
        tokenizer: str | os.PathLike[str] = "",
        cache: SoftLabelCache | None = None,
        id_field: int | None = None,
        dataset: str = "",
        options: Options | None = None,
    ) -> None:
        if isinstance(ins, str) or not isinstance(ins, Sequence):
            raise SettingsError(f"ins={ins!r}: name at least one input of the teachers, in a list")
        if isinstance(predicts, str) or not isinstance(predicts, Sequence):
            raise SettingsError(f"predicts={predicts!r}: expected a list of output names")
        if cache is not None and id_field is None:
            raise SettingsError(
                "cache without id_field: name the field that holds the sample ids; labels are cached by id"
            )
        self._ins = tuple(ins)
        router: Router | None = None
        self._teachers: list[Teachers] = []
        if teachers is not None or route is not None:
            self._teachers, router = resolve_routes(teachers, route)
        self._request = LabelRequest(  # completed when the first epoch starts
            OutputSpec(
                tuple(predicts),
                top_k=top_k,
                temperature=temperature,
                dtype=dtype,
                version=version,
                tokenizer=resolve_tokenizer(os.fspath(tokenizer)),
            ),
            [],
            options or Options(),
            cache,
            dataset,
            router,
            combine,
            input_getters(ins, "ins"),
            teacher_batch_size,
            ids=field_getter(id_field) if cache is not None and id_field is not None else None,
        )
        self._max_teachers: int | None = None
        self._kind: _Kind | None = None
        self._source: Callable[[], Iterable[Any]] | None = None
        self._session: LabelSession | None = None
        self._closed = False

    # Configuration

    def set_sample_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of samples: tuples of fields. The reader yields each tuple with the predictions appended.

        A sample's prediction is an array without a row axis, or with `top_k` a `TopK` with ids and values [k].
        `TopK.stack` combines several of them into a batch.

        Args:
            reader: Function that is called once per epoch and returns an iterable of samples.
        """
        return self._set_source("sample", reader)

    def set_sample_list_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of lists of samples; the reader yields lists of the same lengths. See `set_sample_generator`.

        Args:
            reader: Function that is called once per epoch and returns an iterable of lists.
        """
        return self._set_source("sample_list", reader)

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of batches: tuples of arrays [rows, ...]. The reader yields them with predictions appended.

        Args:
            reader: Function that is called once per epoch and returns an iterable of batches.
        """
        return self._set_source("batch", reader)

    def set_sequence_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of sequences: tuples of fields. Fields named in `ins` are arrays [tokens, ...] of equal length.

        Sequences may differ in length, and nothing is padded. A sequence of T tokens is T rows: row t holds token t and
        the teacher's prediction of token t + 1 (the last row predicts the token after the end). Requests are filled
        with whole sequences up to `teacher_batch_size` tokens. If the teachers' model has an input `position` that is
        not in `ins`, the tokens' positions are sent too. The reader yields each tuple with the predictions appended:
        arrays [tokens, ...], or `TopK` with a row per token.

        Args:
            reader: Function that is called once per epoch and returns an iterable of sequences.
        """
        return self._set_source("sequence", reader)

    def set_sequence_list_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of lists of sequences; the reader yields lists of the same lengths.

        See `set_sequence_generator` for sequences.

        Args:
            reader: Function that is called once per epoch and returns an iterable of lists.
        """
        return self._set_source("sequence_list", reader)

    def set_fixed_teacher(self, teachers: str | Sequence[str]) -> Self:
        """Use these teachers.

        Args:
            teachers: Addresses `host:port`, separated by commas or as a list.
        """
        parts = teachers.split(",") if isinstance(teachers, str) else list(teachers)
        self._check_no_teachers("set_fixed_teacher")
        self._teachers = [Teachers(endpoints=tuple(part.strip() for part in parts if part.strip()))]
        return self

    def set_dynamic_teacher(
        self,
        discovery_servers: str | Sequence[str] | None,
        teacher_service_name: str,
        require_max_teacher: int | None = None,
    ) -> Self:
        """Use the teachers that are registered as `teacher_service_name`.

        Args:
            discovery_servers: URL of the registry, `consul://host:8500`, `etcd://host:2379` or `sqlite:///path`; None
                for `EDL_DISCOVERY` or this machine's SQLite file. The first URL of a list is used.
            teacher_service_name: Name under which the teachers register.
            require_max_teacher: Largest number of teachers to use; None for all.
        """
        self._check_no_teachers("set_dynamic_teacher")
        urls = [discovery_servers] if isinstance(discovery_servers, str) else list(discovery_servers or ())
        self._teachers = [
            Teachers(
                service=teacher_service_name,
                discovery=urls[0].strip() if urls else None,
                max_teachers=require_max_teacher,
            )
        ]
        return self

    def set_require_max_teacher(self, require_max_teacher: int) -> Self:
        """Set the largest number of teachers of a dynamic service to use.

        Args:
            require_max_teacher: Number of teachers, at least 1.

        Raises:
            SettingsError: The first epoch has started, or the number is below 1.
        """
        self._not_started("set_require_max_teacher")
        if not is_count(require_max_teacher):
            raise SettingsError(f"require_max_teacher={require_max_teacher!r}: must be a whole number of at least 1")
        self._max_teachers = require_max_teacher
        return self

    def set_teacher_batch_size(self, teacher_batch_size: int) -> Self:
        """Set the rows per request.

        The default is 32 for samples. For batches it is the whole batch, which is split into pieces of 256 rows if it
        is larger. For sequences it is 2,048 tokens, or a quarter of the tokens that a teacher queues, if that is less.
        Requests are smaller if a teacher accepts fewer rows. A sequence longer than the limit is not split; it becomes
        a request of its own.

        Args:
            teacher_batch_size: Rows per request, at least 1.

        Raises:
            SettingsError: The first epoch has started, or the number is below 1.
        """
        self._not_started("set_teacher_batch_size")
        self._request = replace(self._request, batch_rows=teacher_batch_size)
        return self

    def print_config(self) -> None:
        """Print the configuration."""
        request = self._request
        config = {
            "ins": list(self._ins),
            "predicts": list(request.output_spec.outputs),
            "source": self._kind or "not set",
            "teacher_batch_size": request.batch_rows or "the source's",
            "teachers": ", ".join(group.name for group in self._teachers) or "from the environment",
            "discovery": ", ".join(str(group.discovery or "default") for group in self._teachers if group.service),
            "require_max_teacher": self._max_teachers or "no limit",
            "route": f"by field, {listed([repr(value) for value in request.router.routes])}"
            if request.router
            else None,
            "combine": request.combine,
            "top_k": request.output_spec.top_k,
            "dtype": request.output_spec.dtype,
            "version": request.output_spec.version or "any",
            "cache": (request.cache.path or "in memory") if request.cache is not None else None,
            "options": request.options,
        }
        print("DistillReader:")  # noqa: T201 - printing is what this is for
        for name, value in config.items():
            print(f"  {name}: {value}")  # noqa: T201

    # Use

    def __call__(self) -> Iterator[Any]:
        """Start an epoch and end the previous one.

        Returns:
            An iterator over the source's values with predictions appended.

        Raises:
            ClosedError: The reader is closed.
            SettingsError: No data source or teachers are set.
            TemporaryError: The source is still busy with the previous epoch.
        """
        if self._closed:
            raise ClosedError("the reader is closed")
        if self._source is None or self._kind is None:
            raise SettingsError("no data source: first call set_batch_generator, set_sample_generator or similar")
        source = self._source
        session = self._start()
        session.labeller.check()
        request = session.labeller.request
        kind, _ = _KINDS[self._kind]
        cutter = kind(request.getters, request.batch_rows, request.services, request.ids, request.router)
        epoch = session.begin(lambda: _checked(source()), cutter)
        return EpochIterator(self._deliver(session, epoch))

    def stats(self) -> ReaderStats:
        """Return the counters so far; may be called from any thread while the reader runs."""
        return self._session.stats() if self._session is not None else ReaderStats()

    def close(self) -> None:
        """End the epoch and all connections. The reader cannot be used again."""
        self._closed = True
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> LabelSession:
        if self._session is None:
            groups = self._teachers or teachers_from_env(optional=self._request.cache is not None)
            if self._max_teachers is not None:
                most = self._max_teachers
                groups = [replace(group, max_teachers=most) if group.service else group for group in groups]
            open_session(replace(self._request, teachers=groups), self._keep)
            assert self._session is not None
        return self._session

    def _keep(self, session: LabelSession) -> None:
        if self._closed or self._session is not None:  # after an error in a signal handler during `_start`
            session.close()
        if self._session is None:
            self._session = session
            weakref.finalize(self, session.close_without_waiting).atexit = False  # the session closes itself at exit

    def _deliver(self, session: LabelSession, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield items with predictions. Keeps the reader alive even if the user no longer references it."""
        _, shape = _KINDS[self._kind or "batch"]
        for item, predictions in session.labelled(epoch):
            yield shape(item, predictions)

    def _set_source(self, kind: _Kind, reader: Callable[[], Iterable[Any]]) -> Self:
        if self._source is not None:
            raise SettingsError(f"the data source is already set (as {self._kind})")
        if not callable(reader):
            raise SettingsError(
                f"{reader!r} is not callable: pass a function that returns an iterator, not the iterator"
            )
        self._kind = kind
        self._source = reader
        return self

    def _not_started(self, method: str) -> None:
        if self._session is not None:
            raise SettingsError(f"{method} after the first epoch has started: create a new reader")

    def _check_no_teachers(self, method: str) -> None:
        self._not_started(method)
        if self._request.router is not None:
            raise SettingsError(f"{method} with route=: name the teachers for each value with teachers=")
        if self._teachers:
            names = ", ".join(group.name for group in self._teachers)
            raise SettingsError(f"{method}: the teachers are already set ({names}); create a new reader for others")


def _checked(found: Any) -> Any:
    if not isinstance(found, Iterable) and not hasattr(found, "__getitem__"):
        raise SourceError(
            f"the data source returned {found!r}: it must return an iterable, like a function with `yield`"
        )
    return found


def _sample(item: Item, predictions: list[Any]) -> tuple[Any, ...]:
    return (*item.value, *(values[0] for values in predictions))


def _sample_list(item: Item, predictions: list[Any]) -> list[tuple[Any, ...]]:
    return [(*sample, *(values[row] for values in predictions)) for row, sample in enumerate(item.value)]


def _batch(item: Item, predictions: list[Any]) -> tuple[Any, ...]:
    return (*item.value, *predictions)


def _sequence_list(item: Item, predictions: list[Any]) -> list[tuple[Any, ...]]:
    stops = list(itertools.accumulate(stop - start for _, start, stop in item.parts))
    places = zip(item.value, [0, *stops], stops, strict=False)
    if len(item.parts) == 1:
        return [(*item.value[0], *predictions)]
    # Separate arrays, because a user may keep only one sequence of each list.
    return [(*sample, *(copied(values[start:stop]) for values in predictions)) for sample, start, stop in places]


_KINDS: dict[_Kind, tuple[type[Cutter], Callable[[Item, list[Any]], Any]]] = {
    "sample": (SampleCutter, _sample),
    "sample_list": (SampleListCutter, _sample_list),
    "batch": (BatchCutter, _batch),
    "sequence": (SequenceCutter, _batch),
    "sequence_list": (SequenceListCutter, _sequence_list),
}
"""For each kind of source, the class that cuts the source's values, and the function that appends predictions."""
