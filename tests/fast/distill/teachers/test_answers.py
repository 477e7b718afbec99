"""Answers of teachers that are hostile, broken, not as asked for, or far too large; and how a request is found."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.options import Policy
from edl.errors import BadOutputError, EDLError
from edl.protocol import codec, kserve
from edl.protocol.transport import grpc
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import check, reader_of, samples, why_unused
from tests.fast.distill.teachers.foreign import ForeignServer
from tests.waiting import wait_until

NASTY = "ok\r\n12:00 ERROR all lost\x1b[2J\x1b]0;title\x07\u202egnp.exe\u2028"
ROOT = Path(__file__).parents[4]
FIRST_FAILURE_COUNTS = Options(policy=Policy(task_failures=1))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"versions": ["9" * 100_000]}, "is not a valid name or version"),
        ({"output": NASTY}, "is not a valid name or version"),
        (
            {"rewrite": {"ServerReady": lambda _: b"\xff" * 9}},
            "its answer to ServerReady is not a message of KServe v2",
        ),
    ],
    ids=["version", "output", "protocol"],
)
def test_nonsense_of_a_server_is_refused(fields: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "edl")
    with ForeignServer(**fields) as server:
        words = why_unused(reader_of(server).set_sample_generator(samples(4)), why)
    for text in (words, *caplog.messages):
        assert text.isprintable(), f"as it would reach a log: {text!r:.200}"
        assert len(text) < 5000, f"{len(text)} characters, beginning {text:.80}"


def labels_of(change: Callable[[kserve.ModelInferResponse, list[bytes]], None], **arguments: Any) -> list[Any]:
    with ForeignServer(change=change) as server:
        reader = reader_of(server, options=FIRST_FAILURE_COUNTS, **arguments).set_sample_generator(samples(12))
        with reader:
            return list(reader())


def another_model(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.model_name = "dogs"


def another_id(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.id = f"{int(header.id, 16) + 1:016x}"


def output_twice(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.outputs.add().CopyFrom(header.outputs[0])
    raw.append((np.frombuffer(raw[0], "<f4") + 1).tobytes())


def cast_to(datatype: str, dtype: str) -> Callable[[kserve.ModelInferResponse, list[bytes]], None]:
    def change(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
        header.outputs[0].datatype = datatype
        raw[0] = np.frombuffer(raw[0], "<f4").astype(dtype).tobytes()

    return change


def typed(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.outputs[0].datatype = "INT32"
    header.outputs[0].contents.int_contents.extend(np.frombuffer(raw.pop(), "<f4").astype(int).tolist())


def says_little(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.model_name = header.id = ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_model, "it answers for model 'dogs', but 'm' is requested"),
        (another_id, "its answer is to request '"),
        (output_twice, "output 'y' appears twice in its answer"),
        (cast_to("FP64", "<f8"), "output 'y' is 'FP64', not 'FP32'"),
        (typed, "output 'y' is 'INT32', not 'FP32'"),
    ],
)
def test_an_odd_answer_is_no_label(change: Any, words: str) -> None:
    with pytest.raises(BadOutputError, match=words):
        labels_of(change)


@pytest.mark.parametrize(("change", "dtype"), [(says_little, "float32"), (cast_to("FP16", "<f2"), "float16")])
def test_an_answer_may_say_little(change: Any, dtype: str) -> None:
    rows = labels_of(change, dtype=dtype if dtype == "float16" else None)
    assert [float(y[0]) for *_, y in rows] == list(range(12))
    assert rows[0][-1].dtype == np.dtype(dtype)


REFUSED = {"ModelInfer": (grpc.StatusCode.INTERNAL, "odd shape")}


def halve(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.outputs[0].shape[0] = 2
    raw[0] = raw[0][: len(raw[0]) // 2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"refused": REFUSED}, "if the model takes fewer than 4 rows, .*set_teacher_batch_size"),
        ({"change": halve}, r"\[2, 4\] for 4 rows; if the model takes fewer .*set_teacher_batch_size"),
        ({"x": (4,), "y": (4,)}, r"no batch dimension: its input 'x' \[4\] is one row.*set_teacher_batch_size"),
        ({"x": (4,), "y": (2,)}, r"no batch dimension \(x \[4\], y \[2\]\).*set_teacher_batch_size"),
    ],
)
def test_rows_that_a_model_does_not_take(fields: Any, words: str) -> None:
    with (
        ForeignServer(**fields) as server,
        reader_of(server, options=FIRST_FAILURE_COUNTS).set_sample_generator(samples(8)) as reader,
        pytest.raises(EDLError, match=words),
    ):
        list(reader())


def test_a_fixed_batch_is_padded() -> None:
    options = {"options": FULL_REQUESTS, "teacher_batch_size": None}
    with ForeignServer(x=(4, 4)) as server, reader_of(server, **options).set_sample_generator(samples(10)) as reader:
        check(list(reader()), 10)
    assert server.rows == [4, 4, 4]


SWOLLEN_NBYTES = 120 << 20

STUDENT = """
import json, pathlib, sys
from edl.distill import DistillReader, Options
from tests.fast.distill.reading import samples, why_unused

def peak_mib():  # not of `resource`: that begins with what the parent process had
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))

before = peak_mib()
for words in sys.argv[1:]:
    endpoint, words = words.split(" ", 1)
    reader = DistillReader(["x", None], ["y"], teachers=[endpoint], options=Options(max_answer_bytes=64 << 20))
    why_unused(reader.set_sample_generator(samples(4)), words)
print(json.dumps(peak_mib() - before))
"""


def swell(data: bytes) -> bytes:
    """Field 15, which no message of KServe v2 has."""
    return data + codec.RESPONSE.join(b"", [bytes(SWOLLEN_NBYTES)]).replace(b"\x32", b"\x7a", 1)


def test_no_more_than_was_asked_for(stack: ExitStack) -> None:
    """Answers that are far too large are refused before they take memory, and the reason is said."""
    room, compressed = "max_answer_bytes", "is compressed|max_answer_bytes"
    told = []
    for method, compression, words in (
        ("ModelInfer", grpc.Compression.NoCompression, room),
        ("ModelInfer", grpc.Compression.Gzip, compressed),
        ("ModelMetadata", grpc.Compression.NoCompression, room),
    ):
        server = ForeignServer(rewrite={method: swell}, compression=compression)
        told.append(f"{stack.enter_context(server).endpoint} {words}")
    command = [sys.executable, "-c", STUDENT, *told]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=100, text=True, cwd=ROOT)
    grew_mib = int(run.stdout.splitlines()[-1])
    assert grew_mib < 80, f"{SWOLLEN_NBYTES >> 20} MiB were on their way three times"


def test_a_large_answer_on_a_channel(serve: Serve) -> None:
    teacher = serve("echo", repeat=100_000, server={"tensor_channel": True})
    reader = DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=Options(max_answer_bytes=1 << 20))
    reader.set_batch_generator(lambda: [(np.full((4, 4), 3, np.float32),)])
    why_unused(reader, "an answer of 6,400,064 bytes, .*max_answer_bytes")


FULL_REQUESTS = Options(teacher_timeout_s=60, linger_s=30.0)
"""A source that gets no time for a moment is not silent."""
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def access_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_error_is_found_by_its_id(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "access.log"
    teacher = serve("raises", message="thirteen", server={"access_log": str(path)})
    with DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=FIRST_FAILURE_COUNTS) as reader:
        reader.set_batch_generator(lambda: iter([(np.full((2, 4), 13, np.float32),)]))
        with pytest.raises(BadOutputError) as raised:
            list(reader())
    found = re.search(r"\(request ([0-9a-f]{16})\)", str(raised.value))
    assert found is not None, str(raised.value)
    wait_until(lambda: any(line["id"] == found[1] for line in access_lines(path)))
    line = next(line for line in access_lines(path) if line["id"] == found[1])
    assert line["status"] == "INTERNAL"
    said = [record for record in caplog.records if found[1] in record.getMessage() and record.exc_info]
    assert said[0].levelno == logging.ERROR
    assert "thirteen" in str(said[0].exc_info)


def test_the_users_span_reaches_the_teacher(serve: Serve, tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    path = tmp_path / "access.log"
    teacher = serve("echo", server={"access_log": str(path)})
    context = trace.SpanContext(int(SPAN[3:35], 16), int(SPAN[36:52], 16), False, trace.TraceFlags(1))
    with reader_of(teacher, options=FULL_REQUESTS).set_sample_generator(samples(40)) as reader:
        with trace.use_span(trace.NonRecordingSpan(context)):
            epoch = reader()
            check(list(epoch), 40)
        check(list(reader()), 40)
    wait_until(lambda: sum(line["rows"] for line in access_lines(path)) >= 80)
    spans = [line["traceparent"] == SPAN for line in access_lines(path)]
    assert spans == [True] * (len(spans) // 2) + [False] * (len(spans) // 2)
