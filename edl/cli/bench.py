"""`edl bench`: measure how fast labels reach a student on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edl.cli.output import console
from edl.command_line import CommandParser, at_least, duration
from edl.distill import Credentials, DistillReader, Options, ReaderStats, Teachers
from edl.errors import SettingsError
from edl.testing import LocalTeacher

_DESCRIPTION = """\
Asks teachers for the labels of random inputs as fast as the reader can, and prints rows per second, how long a batch
takes from the source to the training loop, and the CPU time it uses. Without --teachers it starts one with a no-op
model: the figure is then the limit of EDL itself on this machine."""

_EXAMPLES = """\
examples:
  edl bench reader
      EDL itself, with uint8 images [3, 224, 224] in batches of 32
  edl bench reader --shape 128 --dtype int32 --batch 256
      other inputs
  edl bench reader --teachers digits --input image --shape 1,8,8 --dtype float32 --output logits
      your own teachers, by service; --teachers HOST:PORT,HOST:PORT names them one by one"""

_WARM_UP_S = 1.0
"""Warm-up that is not measured: connections are made and windows grow."""
_POOL = 16
"""Number of distinct input arrays: a single one would stay in the CPU cache."""


def main(argv: Sequence[str]) -> int:
    """Run `edl bench`."""
    parser = CommandParser("edl bench", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("what", choices=["reader"], metavar="reader", help="rows per second through a DistillReader")
    add("--teachers", metavar="WHO", help="a service, or HOST:PORT of teachers (default: starts one)")
    parser.add_store_option("where the service registers")
    add("--model", default="", help="name of the model (default: what the teacher says)")
    add("--input", default="image", metavar="NAME", help="the model's input (default: %(default)s)")
    add("--output", default="logits", metavar="NAME", help="the model's output (default: %(default)s)")
    add("--shape", default="3,224,224", help="shape of one row (default: %(default)s)")
    add("--dtype", default="uint8", help="the input's numpy type (default: %(default)s)")
    add("--batch", type=at_least(1), default=32, metavar="ROWS", help="rows per request (default: %(default)s)")
    add("--time", "--seconds", type=duration(0, 3600), default=5.0, help="how long to measure (default: 5s)")
    add("--local", type=at_least(1), default=1, metavar="N", help="teachers to start if none are given")
    add("--json", action="store_true", help="print JSON")
    parser.add_credentials("client", "teachers")
    options = parser.parse_args(argv)
    load = _load(options)
    with contextlib.ExitStack() as stack:
        own = [] if options.teachers else _start(stack, options.local, load)
        who = options.teachers or [teacher.endpoint for teacher in own]
        teachers = replace(Teachers.parse(who, discovery=options.store), model=options.model)
        # Teachers started here have none.
        credentials = Credentials.of_options(vars(options)) if options.teachers else Credentials()
        result = _measure(teachers, load, own, credentials)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        _show(result, load, own=bool(own))
    return 0


@dataclass(frozen=True)
class _Load:
    """The inputs to send, and for how long; `shape` is that of a row."""

    input: str
    output: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    seconds: float


@dataclass(frozen=True)
class _Result:
    """The figures measured after a warm-up.

    `latency_ms` has percentiles of the time from the source to the training loop; `reader_cpu_us` and `teacher_cpu_us`
    the CPU time per row, in the reader and in the teachers started here; `teacher_ms` the median request by teacher.
    """

    rows: int
    seconds: float
    rows_per_s: float
    mb_per_s: float
    latency_ms: dict[str, float]
    reader_cpu_us: float
    teacher_cpu_us: float | None
    rows_resent: int
    teacher_ms: dict[str, float]


def _load(options: argparse.Namespace) -> _Load:
    try:
        shape = tuple(int(size) for size in options.shape.split(",") if size.strip())
        if any(size < 1 for size in shape):
            raise ValueError("sizes must be above 0")
    except ValueError as exc:
        raise SettingsError(f"--shape {options.shape!r}: expected sizes as in 3,224,224 ({exc})") from exc
    try:
        dtype = np.dtype(options.dtype)
    except TypeError as exc:
        raise SettingsError(f"--dtype {options.dtype!r}: expected a numpy type such as uint8 or float32") from exc
    if dtype.kind not in "buif":
        raise SettingsError(f"--dtype {options.dtype!r}: expected a number type such as uint8 or float32")
    return _Load(options.input, options.output, shape, dtype, options.batch, options.time)


def _start(stack: contextlib.ExitStack, count: int, load: _Load) -> list[LocalTeacher]:
    if (load.input, load.output) != ("image", "logits"):
        raise SettingsError(
            "--input and --output are for your own --teachers; those started here have image and logits"
        )
    serve = {"max-batch": load.rows, "max-queue": 64 * load.rows}
    return [
        stack.enter_context(LocalTeacher("zeros", serve=serve, shape=list(load.shape), dtype=load.dtype.name))
        for _ in range(count)
    ]


def _measure(teachers: Teachers, load: _Load, own: list[LocalTeacher], credentials: Credentials) -> _Result:
    sent_at: deque[float] = deque()
    latencies: list[float] = []
    options = Options(credentials=credentials)
    with DistillReader(ins=[load.input], predicts=[load.output], teachers=teachers, options=options) as reader:
        reader.set_batch_generator(lambda: _inputs(load, sent_at))
        rows = 0
        warm_until = time.monotonic() + _WARM_UP_S
        began: tuple[float, float, float, ReaderStats] | None = None
        for _ in reader():
            now = time.monotonic()
            sent = sent_at.popleft()  # batches arrive in request order
            if began is None:
                if now >= warm_until:
                    began = (time.monotonic(), time.process_time(), _cpu_s(own), reader.stats())
                continue
            rows += load.rows
            latencies.append(now - sent)
            if now - began[0] >= load.seconds:
                break
        assert began is not None  # the source never ends
        took, cpu, own_cpu = time.monotonic() - began[0], time.process_time() - began[1], _cpu_s(own) - began[2]
        stats = reader.stats()
    percentiles = np.percentile(latencies, (50, 95, 99)) * 1000
    row_bytes = int(np.prod(load.shape)) * load.dtype.itemsize
    return _Result(
        rows=rows,
        seconds=took,
        rows_per_s=rows / took,
        mb_per_s=rows * row_bytes / took / 1e6,
        latency_ms={f"p{name}": float(value) for name, value in zip((50, 95, 99), percentiles, strict=True)},
        reader_cpu_us=cpu / rows * 1e6,
        teacher_cpu_us=own_cpu / rows * 1e6 if own else None,
        rows_resent=stats.rows_resent - began[3].rows_resent,
        teacher_ms={name: teacher.median_s * 1000 for name, teacher in stats.teachers.items()},
    )


def _inputs(load: _Load, sent_at: deque[float]) -> Iterator[tuple[np.ndarray[Any, Any]]]:
    """Yield batches endlessly from a few prepared ones, so that creating them costs nothing."""
    generator = np.random.default_rng(0)
    pool = [(generator.random((load.rows, *load.shape), np.float32) * 255).astype(load.dtype) for _ in range(_POOL)]
    while True:
        for batch in pool:
            sent_at.append(time.monotonic())
            yield (batch,)


def _cpu_s(teachers: list[LocalTeacher]) -> float:
    """Return the CPU time of these processes in seconds (proc(5), fields 14 and 15 of stat)."""
    ticks = 0
    for teacher in teachers:
        fields = Path(f"/proc/{teacher.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100  # USER_HZ, 100 on Linux whatever the kernel's own clock


def _show(result: _Result, load: _Load, *, own: bool) -> None:
    screen = console(120)
    shape = ", ".join(map(str, load.shape))
    whom = "a no-op teacher" if own else "your teachers"
    latency = ", ".join(f"{name} {value:.1f} ms" for name, value in result.latency_ms.items())
    screen.print(f"{load.dtype.name} [{shape}] in batches of {load.rows}, {whom}, {result.seconds:.1f} s")
    screen.print(f"  [bold]{result.rows_per_s:,.0f} rows/s[/bold] ({result.mb_per_s:,.0f} MB/s of inputs)")
    screen.print(f"  from the source to the training loop: {latency} (mostly queueing)")
    cpu = f"  CPU time per row: {result.reader_cpu_us:.1f} µs in the reader"
    screen.print(cpu + (f", {result.teacher_cpu_us:.1f} µs in the teacher" if result.teacher_cpu_us else ""))
    medians = statistics.median(result.teacher_ms.values()) if result.teacher_ms else 0.0
    teachers = "1 teacher" if len(result.teacher_ms) == 1 else f"{len(result.teacher_ms)} teachers"
    screen.print(f"  {teachers}, a request takes {medians:.1f} ms (median)")
    if result.rows_resent:
        screen.print(f"  [yellow]{result.rows_resent:,} rows were resent[/yellow]")
