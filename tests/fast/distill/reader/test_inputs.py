"""Inputs and answers of uncommon types, of shapes that differ from request to request, and of large ones."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from edl.collective.agent.health.failures import ExitCause, find_exit_cause
from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from edl.distill.torch import distill
from edl.errors import NoTeacherError, SettingsError
from edl.protocol import kserve
from edl.testing.models import Model
from tests.fast.distill.conftest import Serve
from tests.fast.distill.teachers.foreign import ForeignServer
from tests.waiting import wait_until


def model(answer: Callable[[Any], Any], x: str, y: str) -> Model:
    """A model of one input, `x`, and one output, `y`."""
    return Model(lambda inputs: {"y": answer(inputs["x"])}, [f"x:{x}"], [f"y:{y}"])


@pytest.mark.parametrize(
    ("dtype", "shared_memory"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float64, True)],
)
def test_inputs_are_rounded_to_bfloat16(serve: Serve, dtype: torch.dtype, *, shared_memory: bool) -> None:
    """A type that numpy does not have."""
    teacher = serve(model(lambda x: x * 2, "bf16[3]", "float32[3]"))
    batches = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in (5, 1, 8)]
    options = Options(teacher_timeout_s=60, shared_memory=shared_memory)
    with distill(batches, teacher.endpoint, inputs="x", outputs="y", batch_rows=4, options=options) as labelled:
        for batch, labels in labelled:
            assert torch.equal(labels, batch.float().bfloat16().float() * 2)


CLASSES = 11


def scores(ids: Any) -> Any:
    return np.sin(ids[..., None] * 0.37 + np.arange(CLASSES, dtype="f4")).astype("f4")


PER_TOKEN = model(scores, "int32[-1]", f"float32[-1,{CLASSES}]")


def batches(*lengths: int, rows: int = 3) -> Iterator[tuple[Any, Any]]:
    for at, length in enumerate(lengths):
        numbers = np.arange(rows) + rows * at
        yield np.repeat(numbers[:, None], length, 1).astype("i4"), numbers


def reader_of(*endpoints: str, **kwargs: Any) -> DistillReader:
    return DistillReader(["x", None], ["y"], teachers=list(endpoints), **kwargs)


@pytest.mark.parametrize("rows", [None, 2])
def test_lengths_of_labels_follow_batches(serve: Serve, rows: int | None) -> None:
    lengths = [5, 8, 5, 1, 13, 8, 2] * 5
    with reader_of(serve(PER_TOKEN).endpoint, serve(PER_TOKEN).endpoint, teacher_batch_size=rows) as reader:
        reader.set_batch_generator(lambda: batches(*lengths))
        list(reader())
        wait_until(lambda: reader.stats().teachers_live == 2)
        delivered = list(reader())
        assert all(one.failures == 0 for one in reader.stats().teachers.values())
    assert [ids.shape[1] for ids, *_ in delivered] == lengths
    for ids, _, logits in delivered:
        np.testing.assert_allclose(logits, scores(ids), rtol=1e-5)


def test_labels_of_other_inputs_are_told(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Where ids are positions, and the data set has changed."""
    endpoint = serve(PER_TOKEN).endpoint
    with SoftLabelCache() as cache:
        for told, asked in ((0, 60), (0, 0), (1, 0), (1, 0)):
            found = [(ids + np.int32(told), numbers) for ids, numbers in batches(*[5] * 20)]
            with reader_of(endpoint, cache=cache, id_field=1) as reader:
                reader.set_batch_generator(found.copy)
                assert len(list(reader())) == 20
                assert caplog.text.count("differ from those of its stored label") == told, "once"
                assert reader.stats().rows_asked == asked


def test_classes_are_no_ids(serve: Serve) -> None:
    """An id stands for one input, whether that is one of those that are compared with the cache or not."""
    with SoftLabelCache() as cache, reader_of(serve(PER_TOKEN).endpoint, cache=cache, id_field=1) as reader:
        reader.set_sample_generator(lambda: ((np.full(5, at, "i4"), at % 10) for at in [*range(10), *range(3), 13]))
        with pytest.raises(SettingsError, match=r"different inputs have the id 3.*its own id"):
            list(reader())


def test_unfit_pieces_are_named(serve: Serve) -> None:
    as_long_as_said = model(lambda ids: np.zeros((len(ids), int(ids.max())), "f4"), "int32[-1]", "float32[-1]")
    source = [(np.array([[1], [1], [3], [3]], "i4"), None)]
    with reader_of(serve(as_long_as_said, server={"max_batch_rows": 2}).endpoint, teacher_batch_size=2) as reader:
        reader.set_batch_generator(lambda: source)
        with pytest.raises(SettingsError, match=r"'y' has rows of shapes \[1\] and \[3\].*as one request"):
            list(reader())
    with reader_of(serve(as_long_as_said).endpoint) as reader:
        assert [logits.shape for *_, logits in reader.set_batch_generator(lambda: source)()] == [(4, 3)]


MIB = 1 << 20
ROWS, BATCHES = 4, 10


def numbered() -> Iterator[Any]:
    for number in range(BATCHES):
        yield np.full((ROWS, 4), number, np.float32), list(range(number * ROWS, (number + 1) * ROWS))


def read(reader: DistillReader, epochs: int, least: int, most: int) -> None:
    """Read with a loop that takes a batch when as much is held as may be, and no more ever is."""
    held = 0

    def fill(left: int) -> bool:
        nonlocal held
        held = max(held, reader.stats().bytes_held)
        return held >= least or not left

    for _ in range(epochs):
        for number, (x, _, *labels) in enumerate(reader()):
            for label in labels:
                assert len(label) == ROWS
                assert (label if isinstance(label, np.ndarray) else label.values).max() == x[0, 0] == number
            wait_until(lambda left=BATCHES - 1 - number: fill(left))  # type: ignore[misc]
    assert least <= held <= most, f"{held / MIB:.1f} MiB of answers were held"
    assert reader.stats().bytes_held == 0, "an epoch that is over holds something"


@pytest.mark.parametrize("kind", ["plain", "split", "ensemble", "cache"])
def test_waiting_answers_are_bounded(serve: Serve, kind: str) -> None:
    """Answers of 4 MiB, 1 MiB allowed: two at a time, and those of the batch that is waited for."""
    services = [Teachers(endpoints=(serve("echo", repeat=MIB // 16).endpoint,))] * (2 if kind == "ensemble" else 1)
    options: dict[str, Any] = {"options": Options(memory_bytes=MIB)}
    with SoftLabelCache(memory_bytes=256 * MIB) as cache:
        if kind == "cache":
            options |= {"cache": cache, "id_field": 1}
        if kind == "split":
            options |= {"teacher_batch_size": 1}
        with DistillReader(["x", None], ["y"], teachers=services, **options) as reader:
            answer = ROWS * MIB * len(services)
            reader.set_batch_generator(numbered)
            read(reader, 2 if kind == "cache" else 1, least=answer // ROWS, most=2 * answer + MIB)


def test_growing_answers_are_bounded() -> None:
    """Requests that were sent while answers were small are taken back when these become large."""

    def in_flight() -> int:
        return sum(one.in_flight for one in reader.stats().teachers.values())

    def grow(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
        number = np.frombuffer(raw[0], "<f4")[0]
        if number > 100:
            wait_until(lambda: in_flight() <= 3, "the first large answer has had its effect")
        if number >= 100:
            header.outputs[0].shape[1] = MIB // 4
            raw[0] = np.full((ROWS, MIB // 4), number, "<f4").tobytes()

    source = [(np.full((ROWS, 4), number, np.float32), number) for number in range(120)]
    options = Options(memory_bytes=MIB)
    with ForeignServer(y=(-1, -1), change=grow) as server, reader_of(server.endpoint, options=options) as reader:
        for _, number, y in reader.set_batch_generator(lambda: source)():
            assert (y == number).all()
            if number >= 100:
                wait_until(lambda: not in_flight())
                assert reader.stats().bytes_held <= (4 * ROWS + 1) * MIB, "of 16 answers"


def test_a_list_that_is_filled_again(serve: Serve) -> None:
    def source(samples: list[Any]) -> Iterator[list[Any]]:
        for first in range(0, 100, 5):
            samples[:] = [(np.full(4, number, np.float32), number) for number in range(first, first + 5)]
            yield samples

    with DistillReader(["x", None], ["y"], teachers=serve("echo").endpoint) as reader:
        parts = reader.set_sample_list_generator(lambda: source([]))()
        assert [(number, y[3]) for part in parts for _, number, y in part] == [(n, n) for n in range(100)]


WIDE = 1000  # of a row, in FP32: 256 rows are a megabyte
SMALL_MESSAGES = {"max_message_bytes": 256 << 10}


@pytest.mark.parametrize("server", [SMALL_MESSAGES, {"max_queue_rows": 100}])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_requests_are_cut_to_fit(serve: Serve, shared_memory: bool, server: Any) -> None:
    """By bytes on the teacher's host as elsewhere, else what works here fails there."""
    teacher = serve("echo", server=server, width=WIDE)
    numbers = np.arange(600)
    x = np.repeat(numbers[:, None], WIDE, 1).astype("u1")  # a quarter of the bytes that are sent
    with reader_of(teacher.endpoint, options=Options(shared_memory=shared_memory)) as reader:
        [(_, _, labels)] = list(reader.set_batch_generator(lambda: [(x, numbers)])())
        if server is SMALL_MESSAGES:  # a full queue also refuses requests that fit
            assert sum(found.failures for found in reader.stats().teachers.values()) == 0
    assert (labels == x).all()


@pytest.mark.parametrize(
    ("server", "rows", "words"),
    [
        (
            {"max_queue_rows": 100},
            300,
            r"of 300 rows within 0\.5 s; every teacher accepts up to 100 rows: set batch_rows .* to that number",
        ),
        (
            SMALL_MESSAGES,
            100,
            r"of 100 rows with 400,000 bytes within 0\.5 s; every teacher accepts up to 196,608 bytes: "
            "set batch_rows .*--max-message.*max_request_bytes",
        ),
    ],
)
def test_fixed_size_waits_with_a_remedy(serve: Serve, server: Any, rows: int, words: str) -> None:
    teacher = serve("echo", server=server, width=WIDE)
    with reader_of(teacher.endpoint, teacher_batch_size=rows, options=Options(teacher_timeout_s=0.5)) as reader:
        reader.set_batch_generator(lambda: [(np.zeros((rows, WIDE), np.float32), np.arange(rows))])
        with pytest.raises(NoTeacherError, match=words) as raised:
            list(reader())
    text = "".join(traceback.format_exception(raised.value))
    assert find_exit_cause(1, text) is ExitCause.ERROR, "another start of the script would not help"
