"""`edl label` against real teacher processes: complete, resumable after kill -9, and read back without teachers."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.distill import DistillReader
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.compress import TopK, top_k
from edl.errors import NoTeacherError
from tests.fast.distill.conftest import Start, until
from tests.plugins_consul import free_ports

ROWS, WIDTH = 1000, 4
X = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, axis=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows that tell which they are; the teachers echo them."""
    path = tmp_path / "data.npz"
    np.savez(path, x=X, name=np.array([f"row-{row}" for row in range(ROWS)]))
    return path


def command(data: Path | str, output: Path, *more: str) -> list[str]:
    return ["label", str(data), "--inputs", "x", "--outputs", "y", "--output", str(output), *more]


def labels(folder: Path, ids: Any = range(ROWS)) -> Any:
    return load_labels(folder).rows(ids)["y"]


def test_rows_are_labelled_once(start: Start, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows are labelled once and not again."""
    teachers = f"{start('echo').endpoint},{start('echo').endpoint}"
    folder = tmp_path / "labels"
    assert main(command(data, folder, "--teachers", teachers, "--batch", "7")) == 0
    np.testing.assert_array_equal(labels(folder), X)
    first = capsys.readouterr()
    assert "1,000 rows labelled by" in first.out
    assert "0 had a label before" in first.out
    assert re.search(r"^[\d,]+ of 1,000 rows, [\d,]+ rows/s, \d teachers?", first.err, re.MULTILINE)
    files = sorted(folder.rglob("*.safetensors"))
    assert main(command(data, folder, "--teachers", teachers)) == 0
    assert "0 rows labelled by" in (again := capsys.readouterr().out)
    assert "1,000 had a label before" in again
    assert sorted(folder.rglob("*.safetensors")) == files


def test_reader_needs_no_teacher_afterwards(start: Start, data: Path, tmp_path: Path) -> None:
    """A reader needs no teacher afterwards."""
    teacher = start("echo")
    more = ["--teachers", teacher.endpoint, "--ids", "name", "--dataset", "numbers", "--dtype", "float16"]
    assert main(command(data, tmp_path / "labels", *more)) == 0
    teacher.close()
    order = np.random.default_rng(1).permutation(ROWS)

    def batches() -> Any:
        for part in np.array_split(order, 20):
            yield X[part], [f"row-{row}" for row in part]

    with SoftLabelCache(path=tmp_path / "labels") as cache:
        reader = DistillReader(["x", None], ["y"], cache=cache, id_field=1, dataset="numbers")
        with reader.set_batch_generator(batches):
            found = np.concatenate([y for _, _, y in reader()])
        assert reader.stats().rows_cached == ROWS
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, X[order].astype(np.float16))


def test_unlabelled_row_is_named(start: Start, data: Path, tmp_path: Path) -> None:
    """A row without label is named when there are no teachers."""
    assert main(command(data, tmp_path / "labels", "--teachers", start("echo").endpoint)) == 0
    with SoftLabelCache(path=tmp_path / "labels") as cache:
        reader = DistillReader(["x", None], ["y"], cache=cache, id_field=1)
        with (
            reader.set_batch_generator(lambda: iter([(X[:2], [999, 1000])])),
            pytest.raises(NoTeacherError, match="1000"),
        ):
            list(reader())


def test_kill_9_costs_no_stored_label(start: Start, data: Path, tmp_path: Path) -> None:
    """Kill 9 costs no label that was on disk."""
    slow = start(
        "echo", port=free_ports(1)[0], delay_s=0.05, max_batch=2
    )  # 25 s for all rows: they are not labelled before the kill
    teachers = ["--teachers", slow.endpoint, "--batch", "2"]
    folder = tmp_path / "labels"
    # As the command itself, but with a file every half second, so that this takes no minute.
    code = "import sys, edl.cli, edl.cli.cmd_label as it; it._FLUSH_S = 0.5; sys.exit(edl.cli.main(sys.argv[1:]))"
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command(data, folder, *teachers)], stderr=subprocess.DEVNULL
        )
        try:
            seen = len(list(folder.rglob("*.safetensors")))
            until(lambda seen=seen: len(list(folder.rglob("*.safetensors"))) > seen, 60)  # type: ignore[misc]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    kept = len(load_labels(folder))
    slow.close()
    quick = start("echo", port=slow.port)  # another address would be another service
    assert 0 < kept < ROWS
    done = subprocess.run(
        [sys.executable, "-m", "edl", *command(data, folder, "--teachers", quick.endpoint)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{ROWS - kept:,} rows labelled" in done.stdout
    assert f"{kept:,} had a label before" in done.stdout
    np.testing.assert_array_equal(labels(folder), X)


def test_a_teacher_that_dies_costs_nothing(start: Start, data: Path, tmp_path: Path) -> None:
    one, other = start("echo", delay_s=0.01), start("echo", delay_s=0.01)
    killer = threading.Timer(0.3, one.kill)
    killer.start()
    assert (
        main(command(data, tmp_path / "labels", "--teachers", f"{one.endpoint},{other.endpoint}", "--batch", "4")) == 0
    )
    killer.join()
    assert not one.is_alive()
    np.testing.assert_array_equal(labels(tmp_path / "labels"), X)


def test_teachers_come_from_discovery(start: Start, data: Path, tmp_path: Path, registry_url: str) -> None:
    """Teachers are found through discovery."""
    start("echo", service="numbers", discovery=registry_url)
    more = ["--service", "numbers", "--discovery", registry_url]
    assert main(command(data, tmp_path / "labels", *more)) == 0
    np.testing.assert_array_equal(labels(tmp_path / "labels"), X)


def test_top_k_labels(start: Start, data: Path, tmp_path: Path) -> None:
    more = ["--teachers", start("linear").endpoint, "--top-k", "2", "--temperature", "3"]
    assert main(command(data, tmp_path / "labels", *more)) == 0
    found = labels(tmp_path / "labels", range(10))
    assert isinstance(found, TopK)
    expected = top_k(X[:10] @ np.arange(16, dtype=np.float32).reshape(4, 4), 2, 3.0)
    assert found.temperature == 3.0
    np.testing.assert_allclose(found.values, expected.values)
    np.testing.assert_array_equal(found.ids[1:], expected.ids[1:])  # row 0 is all ties
    np.testing.assert_allclose(found.tail_lse, expected.tail_lse, rtol=1e-5)


def test_dataset_with_worker_processes(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dataset with worker processes and only missing samples loaded."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "numbers_of_mine.py").write_text(
        """
import os
import numpy as np
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, at):
        with open(__file__ + ".loaded", "a") as file:
            file.write(f"{at}\\n")
        return np.full(4, at, np.float32), "label"
"""
    )
    loaded = tmp_path / "numbers_of_mine.py.loaded"
    teacher = start("echo").endpoint
    data = f"{tmp_path}/numbers_of_mine.py:Numbers"
    for _ in range(2):
        assert main(command(data, tmp_path / "labels", "--teachers", teacher, "--workers", "2")) == 0
    assert sorted(map(int, loaded.read_text().split())) == list(range(300))
    assert "300 had a label before" in capsys.readouterr().out
    np.testing.assert_array_equal(labels(tmp_path / "labels", range(300)), X[:300])


def test_damaged_label_is_asked_again(
    start: Start, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label that is damaged on disk is asked for again."""
    teacher = start("echo").endpoint
    assert main(command(data, tmp_path / "labels", "--teachers", teacher)) == 0
    (file,) = (tmp_path / "labels").glob("*/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(X[600].tobytes())] ^= 1
    file.write_bytes(damaged)
    capsys.readouterr()
    assert main(command(data, tmp_path / "labels", "--teachers", teacher)) == 0
    assert "999 had a label before" in capsys.readouterr().out
    np.testing.assert_array_equal(labels(tmp_path / "labels"), X)


def test_model_versions_are_not_mixed(
    start: Start, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two versions of a model are not mixed."""
    for version, scale in (("1", 1.0), ("2", 2.0)):
        teacher = start("echo", version=version, scale=scale).endpoint
        assert main(command(data, tmp_path / "labels", "--teachers", teacher)) == 0
        assert f"1,000 rows labelled by m version {version}" in capsys.readouterr().out
    with SoftLabelCache(path=tmp_path / "labels") as cache:
        found = {key.version: load_labels(tmp_path / "labels", key).rows([5])["y"] for key in cache.keys()}  # noqa: SIM118
    assert {version: float(y[0, 0]) for version, y in found.items()} == {"1": 5.0, "2": 10.0}  # type: ignore[index]


def test_a_terminal_gets_a_bar(start: Start, data: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "edl", *command(data, tmp_path / "labels", "--teachers", start("echo").endpoint)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(10) == 0
    assert b"1000/1000" in shown
    assert b"rows/s" in shown
    assert b"1 teacher" in shown


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--teachers", "127.0.0.1:1", "--timeout", "0.5"], 1, "no live teacher for 127.0.0.1:1 within 0.5 s"),
        ([], 2, "no teachers named: pass --service or --teachers, or set EDL_SERVICE"),
        (["--teachers", "nonsense"], 2, "'nonsense': expected host:port"),
        (["--teachers", "a:1", "--service", "b"], 2, "exclude each other"),
        (["--teachers", "a:1", "--batch", "0"], 2, "--batch 0"),
        (["--teachers", "a:1", "--top-k", "0"], 2, "top_k=0"),
        (["--teachers", "a:1", "--temperature", "0"], 2, "temperature=0"),
        (["--teachers", "a:1", "--inputs", "missing"], 2, "no array 'missing', only name, x"),
        (["--teachers", "a:1", "--ids", "missing"], 2, "no array 'missing'"),
        (["--teachers", "a:1", "--output", "/proc/none"], 2, "'/proc/none'"),
    ],
)
def test_mistakes_end_with_one_line(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    code: int,
    words: str,
) -> None:
    for name in ("EDL_SERVICE", "EDL_TEACHERS"):
        monkeypatch.delenv(name, raising=False)
    assert main(command(data, tmp_path / "labels", *more)) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("edl label: ")
    assert words in said[-1]


def test_wrong_input_is_the_users_error(
    start: Start, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong input is the users error and not a hang."""
    teacher = start("echo").endpoint
    assert main(command(data, tmp_path / "labels", "--teachers", teacher, "--inputs", "image=x")) == 1
    assert "wants input 'x'" in capsys.readouterr().err
    assert main(command(data, tmp_path / "labels", "--teachers", teacher, "--outputs", "z", "--timeout", "3")) == 1
    assert "'z'" in capsys.readouterr().err
