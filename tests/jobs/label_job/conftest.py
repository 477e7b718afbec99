"""Jobs of real processes, which end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.label_job.processes import Run, counting_teacher


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(rows: int, *, teachers: int = 1, **model: Any) -> Run:
        runs.append(Run(tmp_path, [counting_teacher(tmp_path, **model) for _ in range(teachers)], rows))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
