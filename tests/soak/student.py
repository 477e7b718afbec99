"""A student of the soak: epoch after epoch through a reader, each row checked against what it must be.

    python -m tests.soak.student '{"kind": "batch", "services": ["image"], ...}'

It writes a line of JSON for each epoch, appended in one write, and counts the rows that it has seen in a file of eight
bytes, by which the soak tells that it is alive. SIGUSR1 prints what all threads do, SIGTERM ends it after the epoch.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edl.distill import DistillReader, Teachers
from edl.distill.cache import SoftLabelCache
from edl.distill.options import Options
from edl.errors import EDLError
from tests.soak.verdict import SERVICES, Array, EpochRecord, RowCheck, labels_of, rows_of

_TEACHER_TIMEOUT_S = 60.0  # longer than any fault lasts, so that `NoTeacherError` is a failure
_MEMORY_BYTES = 8 << 20  # a small bound, so that it is in force
_SHARE_ENDED_EARLY = 0.2  # of the epochs: left by break or by an error, as users do
_SHARE_NEW_READER = 0.1  # of the epochs: begun with a new reader, so that what a closed one leaves behind adds up


@dataclass(frozen=True)
class StudentSpec:
    """What a student does; several services are an ensemble, and each has a URL of its own."""

    kind: str  # sample, sample_list, batch, stream (slow samples), or torch (a DataLoader with workers)
    services: list[str]
    discovery: list[str]
    journal: str
    progress: str
    cache: str
    rows: int
    seed: int


class LeftLoopError(Exception):
    """What a user's training loop raises in the middle of an epoch."""


class Student:
    def __init__(self, spec: StudentSpec) -> None:
        self.spec = spec
        self.service = SERVICES[spec.services[0]]
        self._random = random.Random(spec.seed * 1_000_003 + os.getpid())
        self._progress = os.open(spec.progress, os.O_RDWR | os.O_CREAT, 0o600)
        self._seen = 0
        self._reader: Any = None
        self._first_row, self._rows = 0, 0
        self.stopping = False

    def run(self) -> None:
        kept: BaseException | None = None
        for epoch in itertools.count():
            if self.stopping:
                break
            if self._reader is None or self._random.random() < _SHARE_NEW_READER:
                if self._reader is not None:
                    self._reader.close()
                self._reader = self._open()
            kept = self._epoch(epoch, kept)
        if self._reader is not None:
            self._reader.close()

    def _epoch(self, epoch: int, kept: BaseException | None) -> BaseException | None:
        """One epoch, recorded. The error of the last one is kept alive meanwhile, as a loop with `error = exc` does."""
        # With a cache, and from a data set, the same rows come again; else each epoch has rows that no other has.
        again = bool(self.spec.cache) or self.spec.kind == "torch"
        self._first_row = 0 if again else self._random.randrange(1 << 34)
        longer = 0 if self.spec.kind == "torch" else self._random.randrange(self.spec.rows // 2)
        self._rows = self.spec.rows + longer
        check = RowCheck(self._first_row)
        early = self._random.random() < _SHARE_ENDED_EARLY
        ends_at = self._random.randrange(self._rows) if early else None
        how, error = "whole", ""
        began = time.monotonic()
        try:
            self._pass(check, ends_at)
            if ends_at is not None:
                how = "break"
        except LeftLoopError as exc:
            how, kept = "raise", exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, the epoch has failed, and the journal says of what
            how, error = "failed", f"{type(exc).__name__}: {exc}"
        if how == "whole":
            check.end(self._rows)
        if epoch % 8 == 0:
            gc.collect()
        self._write(EpochRecord.of(self.spec.kind, epoch, how, error, check, time.monotonic() - began))
        return kept

    def _pass(self, check: RowCheck, ends_at: int | None) -> None:
        raises = self._random.random() < 0.5
        for numbers, inputs, labels in self._items():
            expected = [labels_of(SERVICES[name], numbers) for name in self.spec.services]
            check.add(numbers, np.array_equal(inputs, rows_of(self.service, numbers)), labels, expected)
            self._seen += len(numbers)
            os.pwrite(self._progress, self._seen.to_bytes(8, "little"), 0)
            if ends_at is not None and check.delivered > ends_at:
                if raises:
                    raise LeftLoopError
                return

    # Readers and sources

    def _open(self) -> Any:
        spec = self.spec
        teachers = [Teachers(name, discovery=url) for name, url in zip(spec.services, spec.discovery, strict=True)]
        options = Options(teacher_timeout_s=_TEACHER_TIMEOUT_S, memory_bytes=_MEMORY_BYTES)
        if spec.kind == "torch":
            return self._open_torch(teachers, options)
        cache = self._open_cache() if spec.cache else None
        reader = DistillReader(
            ins=["x", None], predicts=["y"], teachers=teachers, options=options, cache=cache,
            id_field=1 if cache is not None else None, dataset="soak" if cache is not None else "",
        )  # fmt: skip
        if spec.kind in ("sample", "stream"):
            return reader.set_sample_generator(self._samples)
        if spec.kind == "sample_list":
            return reader.set_sample_list_generator(self._sample_lists)
        return reader.set_batch_generator(self._batches)

    def _open_cache(self) -> SoftLabelCache:
        """Open the cache's folder; try again where its disk is away, which is said at once and by a clear error."""
        deadline = time.monotonic() + _TEACHER_TIMEOUT_S
        while True:
            try:
                return SoftLabelCache(_MEMORY_BYTES, self.spec.cache)
            except EDLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _open_torch(self, teachers: list[Teachers], options: Options) -> Any:
        import torch
        from torch.utils.data import DataLoader

        from edl.distill.torch import distill

        torch.set_num_threads(1)
        numbers = np.arange(self.spec.rows)
        data: Any = list(zip(rows_of(self.service, numbers), numbers.tolist(), strict=True))
        loader = DataLoader(data, 48, num_workers=2, persistent_workers=True)
        return distill(loader, teachers, inputs=["x", None], outputs="y", options=options)

    def _items(self) -> Iterator[tuple[Array, Array, list[Array]]]:
        """Numbers, inputs and labels (one a service) of what the reader delivers, rows first."""
        if self.spec.kind == "torch":
            for (inputs, numbers), labels in self._reader:
                several = labels if isinstance(labels, tuple) else (labels,)
                yield numbers.numpy(), inputs.numpy(), [label.numpy() for label in several]
            return
        for item in self._reader():
            if self.spec.kind == "sample_list":
                columns = [np.stack(column) for column in zip(*item, strict=True)]
            elif self.spec.kind == "batch":
                columns = list(item)
            else:
                columns = [np.asarray(value)[None] for value in item]
            yield columns[1], columns[0], columns[2:]

    def _numbers(self, most: int) -> Iterator[Array]:
        at, end = self._first_row, self._first_row + self._rows
        while at < end:
            rows = min(self._random.randint(1, most), end - at)
            yield np.arange(at, at + rows, dtype=np.int64)
            at += rows

    def _batches(self) -> Iterator[tuple[Array, Array]]:
        for numbers in self._numbers(200):
            yield rows_of(self.service, numbers), numbers

    def _samples(self) -> Iterator[tuple[Array, int]]:
        for numbers in self._numbers(64):
            if self.spec.kind == "stream":
                time.sleep(0.05)
            yield from zip(rows_of(self.service, numbers), numbers.tolist(), strict=True)

    def _sample_lists(self) -> Iterator[list[tuple[Array, int]]]:
        for numbers in self._numbers(40):
            yield list(zip(rows_of(self.service, numbers), numbers.tolist(), strict=True))

    def _write(self, record: EpochRecord) -> None:
        line = json.dumps(asdict(record)) + "\n"
        with Path(self.spec.journal).open("ab", buffering=0) as file:
            file.write(line.encode())


def main(argv: list[str]) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    student = Student(StudentSpec(**json.loads(argv[0])))

    def stop(*_: object) -> None:
        student.stopping = True

    signal.signal(signal.SIGTERM, stop)
    student.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
