"""`DistillReader`: a data source in, the same data with soft labels out, in order and each sample exactly once.

The contract is that of PaddlePaddle EDL 0.3's class of the same name, so that its users' programs go on working.
"""

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
from edl.distill.pipeline.label_cache import CacheConfig
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
    """Adds teachers' predictions to what a data source yields.

    ::

        reader = DistillReader(ins=["image", None], predicts=["logits"])   # (image, label) samples; label is not sent
        reader.set_dynamic_teacher("consul://10.0.0.1:8500", "resnet-teacher")
        reader.set_batch_generator(batches)
        for image, label, logits in reader():
            ...

    The source runs in a background thread, ahead of the training loop; what it yields is passed on as it is, so it must
    yield new arrays every time, not a buffer filled again and again.

    Methods that set something return this reader. They raise `SettingsError` for invalid values, for a second
    source, for teachers if some are set already, and once the first epoch has started.

    Args:
        ins: Name of the teachers' input that each field of a sample is, or None for a field that only passes through.
            Further fields pass through, too; a name that the teachers' model does not have is not sent. A sample with
            fewer fields is a `SourceError`.
        predicts: Names of the teachers' outputs, which are added behind the fields.
        teachers: Alternative to `set_fixed_teacher` and `set_dynamic_teacher`: a service's name, endpoints, `Teachers`,
            or a list of `Teachers` for an ensemble.
        teacher_batch_size: Rows of a request; see `set_teacher_batch_size`.
        route: Position of the field whose value says which teachers label a sample, or a function of the sample; in a
            batch, each row has its value, or all have one. `teachers` is then a mapping from value to a service,
            endpoints or `Teachers`; the key None labels all other values.
        combine: What to make of an ensemble's answers; see `edl.distill.pipeline.answers.Combiner`. With "each" the
            predictions of all services follow one another, in the order of `teachers`.
        top_k: Deliver the k largest logits of a row as `TopK`; None for whole outputs.
        temperature: Temperature at which the tail's mass is summed up with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None for the model's own.
        version: Use labels of this version of the model only; empty for any.
        tokenizer: Path of the student's tokenizer (a tokenizer.json, or a model's folder), or its hash: teachers with
            another tokenizer are refused by name. Empty for any.
        cache: Keeps soft labels, so that samples seen before are not asked for again. If the cache has all labels, no
            teachers need to be named.
        id_field: Position of the field that holds a sample's id (an integer or a string); used only with a cache.
        dataset: What the ids mean, with a cache; see `edl.distill.cache.CacheKey`.
        options: Deadlines, memory, hedging; see `Options`.

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
                "cache without id_field: name the field with the samples' ids, by which it finds labels"
            )
        self._ins = tuple(ins)
        router: Router | None = None
        self._teachers: list[Teachers] = []
        if teachers is not None or route is not None:
            self._teachers, router = resolve_routes(teachers, route)
        # Completed when the first epoch starts, with what was set by then.
        self._request = LabelRequest(
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
            CacheConfig(cache, dataset) if cache is not None else None,
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
        """Set a source of samples: tuples of fields. Delivered: the tuple with the predictions behind it.

        A sample's prediction is an array without the axis of rows; with `top_k` a `TopK` likewise, ids and values [k].
        `TopK.stack` makes a batch of several.

        Args:
            reader: Function that is called once per epoch and returns an iterable of samples.
        """
        return self._set_source("sample", reader)

    def set_sample_list_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of lists of samples.

        Delivered: lists of the same lengths, of samples as `set_sample_generator` has them.

        Args:
            reader: Function that is called once per epoch and returns an iterable of lists.
        """
        return self._set_source("sample_list", reader)

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of batches: tuples of arrays [rows, ...]. Delivered: the same with predictions behind.

        Args:
            reader: Function that is called once per epoch and returns an iterable of batches.
        """
        return self._set_source("batch", reader)

    def set_sequence_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of sequences: tuples of fields; of those named in `ins`, arrays [tokens, ...] of equal length.

        Sequences may differ in length, and nothing is padded: a sequence of T tokens is T rows; row t holds token t and
        the teacher's prediction of token t + 1 (the last row predicts what would follow). Requests are filled with
        whole sequences up to `teacher_batch_size` tokens. Where the teachers' model has an input `position`, and `ins`
        does not name it, the tokens' positions are sent as well. Delivered: the tuple with the predictions behind it,
        arrays [tokens, ...] or `TopK` with a row for each token.

        Args:
            reader: Function that is called once per epoch and returns an iterable of sequences.
        """
        return self._set_source("sequence", reader)

    def set_sequence_list_generator(self, reader: Callable[[], Iterable[Any]]) -> Self:
        """Set a source of lists of sequences.

        Delivered: lists of the same lengths, of sequences as `set_sequence_generator` has them.

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
        """Use the teachers that register as `teacher_service_name`.

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
        """Set the rows of a request.

        Default: 32 with samples; with batches the whole batch, or pieces of 256 if it is larger; with sequences 2,048
        tokens, or a quarter of what a teacher queues. A request is smaller if a teacher accepts no more. A longer
        sequence is never split; it is a request of its own.

        Args:
            teacher_batch_size: Rows of a request, at least 1.

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
            "cache": (request.cache_config.cache.path or "in memory") if request.cache_config else None,
            "options": request.options,
        }
        print("DistillReader:")  # noqa: T201 - printing is what this is for
        for name, value in config.items():
            print(f"  {name}: {value}")  # noqa: T201

    # Use

    def __call__(self) -> Iterator[Any]:
        """Start an epoch, which ends the epoch before it.

        Returns:
            An iterator over what the source yields, with predictions.

        Raises:
            ClosedError: The reader is closed.
            SettingsError: No data source or teachers are set.
            TemporaryError: The source is still busy with the previous epoch.
        """
        if self._closed:
            raise ClosedError("the reader is closed")
        if self._source is None or self._kind is None:
            raise SettingsError("no data source: call set_batch_generator, set_sample_generator or its like first")
        source = self._source
        session = self._start()
        session.labeller.check()
        request = session.labeller.request
        kind, _ = _KINDS[self._kind]
        cutter = kind(request.getters, request.batch_rows, request.services, request.ids, request.router)
        epoch = session.begin(lambda: _checked(source()), cutter)
        return EpochIterator(self._deliver(session, epoch))

    def stats(self) -> ReaderStats:
        """Return what has been done so far; may be called from any thread while the reader runs."""
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
            groups = self._teachers or teachers_from_env(optional=self._request.cache_config is not None)
            if self._max_teachers is not None:
                most = self._max_teachers
                groups = [replace(group, max_teachers=most) if group.service else group for group in groups]
            open_session(replace(self._request, teachers=groups), self._keep)
            assert self._session is not None
        return self._session

    def _keep(self, session: LabelSession) -> None:
        if self._closed or self._session is not None:  # after an error of a signal handler in `_start`
            session.close()
        if self._session is None:
            self._session = session
            weakref.finalize(self, session.close_without_waiting).atexit = False  # the session sees to that

    def _deliver(self, session: LabelSession, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield what the user gets. This holds the reader, which its user may have let go by then."""
        _, shape = _KINDS[self._kind or "batch"]
        for item, predictions in session.labelled(epoch):
            yield shape(item, predictions)

    def _set_source(self, kind: _Kind, reader: Callable[[], Iterable[Any]]) -> Self:
        if self._source is not None:
            raise SettingsError(f"the data source is set already (as {self._kind})")
        if not callable(reader):
            raise SettingsError(
                f"{reader!r} is not callable: pass a function that returns an iterator, not the iterator"
            )
        self._kind = kind
        self._source = reader
        return self

    def _not_started(self, method: str) -> None:
        if self._session is not None:
            raise SettingsError(f"{method} after the first epoch has started: make a new reader")

    def _check_no_teachers(self, method: str) -> None:
        self._not_started(method)
        if self._request.router is not None:
            raise SettingsError(f"{method} with route=: name the teachers of each value with teachers=")
        if self._teachers:
            names = ", ".join(group.name for group in self._teachers)
            raise SettingsError(f"{method}: the teachers are set already ({names}); make a new reader for others")


def _checked(found: Any) -> Any:
    if not isinstance(found, Iterable) and not hasattr(found, "__getitem__"):
        raise SourceError(
            f"the data source returned {found!r}: it must return an iterable, as a function with `yield` does"
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
    # Arrays of their own: a user may keep a sequence of each list.
    return [(*sample, *(copied(values[start:stop]) for values in predictions)) for sample, start, stop in places]


_KINDS: dict[_Kind, tuple[type[Cutter], Callable[[Item, list[Any]], Any]]] = {
    "sample": (SampleCutter, _sample),
    "sample_list": (SampleListCutter, _sample_list),
    "batch": (BatchCutter, _batch),
    "sequence": (SequenceCutter, _batch),
    "sequence_list": (SequenceListCutter, _sequence_list),
}
"""What cuts the values of a kind of source, and what puts predictions behind them."""
