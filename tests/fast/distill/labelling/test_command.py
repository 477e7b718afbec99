"""`edl label` from end to end: complete, resumable, and read back without teachers."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.distill import DistillReader
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.compress import TopK, top_k
from edl.errors import NoTeacherError
from tests.fast.distill.conftest import Register, Serve
from tests.waiting import DEADLINE_S

ROWS, WIDTH = 1000, 4
X = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, axis=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows that tell which they are; the teachers echo them."""
    path = tmp_path / "data.npz"
    np.savez(path, x=X, name=np.array([f"row-{row}" for row in range(ROWS)]))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "labels"


def command(data: Path | str, output: Path, *more: str) -> list[str]:
    return ["label", str(data), "--inputs", "x", "--outputs", "y", "--output", str(output), *more]


def labels(folder: Path, ids: Any = range(ROWS)) -> Any:
    return load_labels(folder).rows(ids)["y"]


def test_reader_needs_no_teacher_afterwards(serve: Serve, data: Path, folder: Path) -> None:
    teacher = serve("echo")
    more = ["--teachers", teacher.endpoint, "--ids", "name", "--dataset", "numbers", "--dtype", "float16"]
    assert main(command(data, folder, *more)) == 0
    teacher.close()
    order = np.random.default_rng(1).permutation(ROWS)

    def batches() -> Any:
        for part in np.array_split(order, 20):
            yield X[part], [f"row-{row}" for row in part]

    with SoftLabelCache(path=folder) as cache:
        reader = DistillReader(["x", None], ["y"], cache=cache, id_field=1, dataset="numbers")
        with reader.set_batch_generator(batches):
            found = np.concatenate([y for _, _, y in reader()])
        assert reader.stats().rows_cached == ROWS
        reader = DistillReader(["x", None], ["y"], cache=cache, id_field=1, dataset="numbers")
        with (
            reader.set_batch_generator(lambda: iter([(X[:2], ["row-7", "row-1000"])])),
            pytest.raises(NoTeacherError, match="row-1000"),
        ):
            list(reader())
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, X[order].astype(np.float16))


def test_top_k_labels_from_discovery(
    serve: Serve, register: Register, data: Path, folder: Path, registry_url: str
) -> None:
    with register(serve("linear").endpoint, "numbers"):
        more = ["--service", "numbers", "--discovery", registry_url, "--top-k", "2", "--temperature", "3"]
        assert main(command(data, folder, *more)) == 0
    found = labels(folder, range(10))
    assert isinstance(found, TopK)
    expected = top_k(X[:10] @ np.arange(16, dtype=np.float32).reshape(4, 4), 2, 3.0)
    assert found.temperature == 3.0
    np.testing.assert_allclose(found.values, expected.values)
    np.testing.assert_array_equal(found.ids[1:], expected.ids[1:])  # row 0 is all ties
    np.testing.assert_allclose(found.tail_lse, expected.tail_lse, rtol=1e-5)


def test_a_terminal_gets_a_bar(serve: Serve, data: Path, folder: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "edl", *command(data, folder, "--teachers", serve("echo").endpoint)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(DEADLINE_S) == 0
    for words in (b"1000/1000", b"rows/s", b"1 teacher"):
        assert words in shown


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--teachers", "127.0.0.1:1", "--timeout", "0.5"], 1, "no live teacher for 127.0.0.1:1 within 0.5 s"),
        ([], 2, "no teachers named: pass --service or --teachers, or set EDL_SERVICE"),
        (["--teachers", "a:1", "--service", "b"], 2, "exclude each other"),
        (["--teachers", "a:1", "--batch", "0"], 2, "--batch 0"),
        (["--teachers", "a:1", "--inputs", "missing"], 2, "no array 'missing', only name, x"),
        (["--teachers", "a:1", "--output", "/proc/none"], 2, "'/proc/none'"),
    ],
)
def test_mistakes_end_with_one_line(
    data: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    code: int,
    words: str,
) -> None:
    for name in ("EDL_SERVICE", "EDL_TEACHERS"):
        monkeypatch.delenv(name, raising=False)
    assert main(command(data, folder, *more)) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("edl label: ")
    assert words in said[-1]
