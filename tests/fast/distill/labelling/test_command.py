"""`edl label` from end to end: complete, resumable, and read back without teachers."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.datasets.rows import ArrayData
from edl.distill import DistillReader
from edl.distill.cache import CacheKey, SoftLabelCache, load_labels
from edl.distill.compress import TopK, top_k
from edl.distill.labelling import DataGuard, Labeller, note_files
from edl.errors import ConflictError, SettingsError
from edl.testing.models import prefix_scores_of
from tests.fast.distill.conftest import Register, Serve, Served
from tests.fast.distill.sequences.language_model import sequences

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
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, X[order].astype(np.float16))


def test_top_k_labels_from_discovery(serve: Serve, register: Register, data: Path, folder: Path, url: str) -> None:
    with register(serve("linear").endpoint, "numbers"):
        more = ["--service", "numbers", "--discovery", url, "--top-k", "2", "--temperature", "3"]
        assert main(command(data, folder, *more)) == 0
    found = load_labels(folder).rows(range(10))["y"]
    assert isinstance(found, TopK)
    expected = top_k(X[:10] @ np.arange(16, dtype=np.float32).reshape(4, 4), 2, 3.0)
    assert found.temperature == 3.0
    np.testing.assert_allclose(found.values, expected.values)
    np.testing.assert_array_equal(found.ids[1:], expected.ids[1:])  # row 0 is all ties
    np.testing.assert_allclose(found.tail_lse, expected.tail_lse, rtol=1e-5)


def test_labels_of_other_data_are_refused(
    serve: Serve, data: Path, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of an edited file whose ids are positions, too; data that grew at their end are the same."""
    run = command(data, folder, "--teachers", serve("echo").endpoint)
    assert main(run) == 0
    np.savez(data, x=np.concatenate([X, X[:5]]))
    assert main(run) == 0
    assert "5 rows labelled" in capsys.readouterr().out
    assert f"the data grew from {ROWS} rows to {ROWS + 5}; of the earlier rows, 16 were compared" in caplog.text
    np.savez(data, x=np.concatenate([X + 1, X[:5]]))
    assert main(run) == 1
    assert "the folder has labels of other data: rows or their ids have different content" in capsys.readouterr().err
    assert main([*run, "--relabel"]) == 0
    np.testing.assert_array_equal(load_labels(folder).rows(range(ROWS))["y"], X + 1)
    assert main([*run, "--relabel"]) == 0
    assert f"{ROWS + 5:,} already had a label" in capsys.readouterr().out


def test_a_note_without_labels_refuses_nobody(tmp_path: Path) -> None:
    """As a command with a mistake leaves it."""
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(CacheKey("m", "1", ("y",)))
        DataGuard(ArrayData({"x": X})).admit(view)
        DataGuard(ArrayData({"x": X + 1})).admit(view)
        view.put([0], {"y": X[:1]})
        with pytest.raises(ConflictError, match="labels of other data"):
            DataGuard(ArrayData({"x": X})).admit(view)


def test_rows_may_differ_with_no_data_check(tmp_path: Path) -> None:
    """Decoded on another machine, also if there are more of them now."""
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(CacheKey("m", "1", ("y",)))
        DataGuard(ArrayData({"x": X[:-1]})).admit(view)
        view.put([0], {"y": X[:1]})
        DataGuard(ArrayData({"x": X + 1}), compare_rows=False).admit(view)
        with pytest.raises(ConflictError, match="labels of other data"):
            DataGuard(ArrayData({"x": X[1:-2]})).admit(view)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b" "), "was rewritten .*16,128 bytes, now 16,129"),
        (lambda path: Path(shutil.copy2(path, f"{path}~")).replace(path), "replaced"),  # as large, and as old
        (os.unlink, "No such file"),
    ],
)
def test_any_change_of_a_file_is_noticed(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, X)
    guard = DataGuard(ArrayData({"x": X}), note_files(str(path), None, f"{path}:factory"))
    with SoftLabelCache(0, tmp_path / "labels") as cache:
        view = cache.view(CacheKey("m", "1", ("y",)))
        guard.check_unchanged(view, in_job=False, at_end=True)
        change(path)
        with pytest.raises(ConflictError, match=words):
            guard.check_unchanged(view, in_job=False)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--teachers", "127.0.0.1:1", "--timeout", "0.5"], 1, "no live teacher for 127.0.0.1:1 within 0.5 s"),
        ([], 2, "no teachers named: pass --service or --teachers, or set EDL_SERVICE"),
        (["--teachers", "a:1", "--service", "b"], 2, "cannot be combined"),
        (["--teachers", "a:1", "--batch", "0"], 2, "--batch 0"),
        (["--teachers", "a:1", "--temperature", "2"], 2, "--temperature 2 requires --top-k"),
        (["--teachers", "a:1", "--output", "/proc/none"], 2, "'/proc/none'"),
        (["--teachers", "a:1", "--outputs", "y,y"], 2, "outputs ('y', 'y'): a name appears twice"),
        (["--teachers", "a:1", "--inputs", "x,x=name"], 2, "--inputs 'x,x=name': a name appears twice"),
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


def test_an_empty_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.npy"
    path.touch()
    assert main(command(path, tmp_path / "labels", "--teachers", "a:1")) == 2
    assert f"data '{path}' cannot be read: No data left in file" in capsys.readouterr().err


# Of sequences: complete, each text once.

TEXTS = sequences(200)


@pytest.fixture
def teacher(serve: Serve) -> Served:
    return serve("prefix_scores", {"max_batch_rows": 512})


def write(path: Path, texts: list[np.ndarray] = TEXTS) -> Path:
    lines = [json.dumps({"id": f"t{number}", "input_ids": text.tolist()}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def of_texts(data: Any, output: Path, teacher: str) -> list[str]:
    wanted = ["--inputs", "ids=input_ids", "--outputs", "logprobs", "--ids", "id"]
    return ["label", str(data), *wanted, "--output", str(output), "--teachers", teacher]


def check(folder: Path, texts: list[np.ndarray] = TEXTS) -> None:
    labels = load_labels(folder)
    there = [number for number, text in enumerate(texts) if len(text)]
    assert len(labels) == len(there)
    inputs = {"ids": [texts[number] for number in there]}
    for number, found in zip(there, labels.of_sequences([f"t{number}" for number in there], inputs), strict=True):
        assert found["logprobs"].tolist() == prefix_scores_of(texts[number]).tolist(), f"text {number}"


def test_each_text_is_labelled_once(
    teacher: Served, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*TEXTS, np.empty(0, np.int32)]
    data = write(tmp_path / "t.jsonl", texts)
    assert main(of_texts(data, folder, teacher.endpoint)) == 0
    said = capsys.readouterr().out
    assert "200 sequences labelled by" in said
    assert "1 of 201 sequences are empty and have no label" in said
    assert "padded(ids, attention_mask)" in said
    check(folder, texts)
    edited = [*texts[:-1], np.array([4, 4])]
    edited[7] = edited[7][::-1] + 1
    assert main(of_texts(write(data, edited), folder, teacher.endpoint)) == 0
    assert "2 sequences labelled by" in capsys.readouterr().out  # whose texts changed, whatever their ids
    check(folder, edited)
    teacher.close()
    with SoftLabelCache(0, folder) as cache:
        reader = DistillReader(["ids", None], ["logprobs"], cache=cache, id_field=1)
        with reader.set_sequence_generator(lambda: ((text, f"t{number}") for number, text in enumerate(edited))):
            assert sum(len(labels) for _, _, labels in reader()) == reader.stats().rows_cached


def test_texts_that_grow_are_noticed(
    teacher: Served, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, since each label is of its own text: the same command labels the others."""
    data = write(tmp_path / "t.jsonl", TEXTS[:150])
    label_all = Labeller.label_all

    def growing(labeller: Labeller, tell: Any) -> Any:
        write(data)
        return label_all(labeller, tell)

    with monkeypatch.context() as patch:
        patch.setattr(Labeller, "label_all", growing)
        assert main(of_texts(data, folder, teacher.endpoint)) == 1
    assert "Run the command again: this labels the sequences that have changed" in capsys.readouterr().err
    check(folder, TEXTS[:150])
    assert main(of_texts(data, folder, teacher.endpoint)) == 0
    assert "50 sequences labelled by" in capsys.readouterr().out
    check(folder)


def test_data_of_the_other_kind_are_refused(
    teacher: Served, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "rows.npz", input_ids=np.zeros((4, 3), np.int32), id=np.arange(4))
    assert main(of_texts(tmp_path / "rows.npz", tmp_path / "labels", teacher.endpoint)) == 2
    assert "the data set has rows, but the teachers' model 'm' takes sequences" in capsys.readouterr().err
    asked = of_texts(write(tmp_path / "t.jsonl"), tmp_path / "labels", serve("echo").endpoint)
    other = {"ids=input_ids": "x=input_ids", "logprobs": "y"}
    assert main([other.get(word, word) for word in asked]) == 2
    assert "has sequences, but the teachers' model 'm' takes rows" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="has no labels"):
        load_labels(tmp_path / "labels")


def test_a_dataset_and_offsets(teacher: Served, tmp_path: Path) -> None:
    program = "from tests.fast.distill.sequences.language_model import sequences\n\n\ndef texts():\n"
    (tmp_path / "corpus.py").write_text(program + "    return sequences(40)\n")
    wanted = ["--outputs", "logprobs", "--output", str(tmp_path / "labels"), "--teachers", teacher.endpoint]
    assert main(["label", f"{tmp_path / 'corpus.py'}:texts", "--inputs", "ids", "--sequences", *wanted]) == 0
    texts = sequences(40)
    np.savez(tmp_path / "t.npz", tokens=np.concatenate(texts), begins=np.cumsum([0, *map(len, texts)]))
    newest = "SELECT max(number) FROM label"
    before = sqlite3.connect(tmp_path / "labels" / "labels.sqlite").execute(newest).fetchall()
    assert main(["label", str(tmp_path / "t.npz"), "--inputs", "ids=tokens", "--offsets", "begins", *wanted]) == 0
    assert sqlite3.connect(tmp_path / "labels" / "labels.sqlite").execute(newest).fetchall() == before
    found = load_labels(tmp_path / "labels").of_sequences(range(40), {"ids": texts})
    for text, labels in zip(texts, found, strict=True):
        assert labels["logprobs"].tolist() == prefix_scores_of(text).tolist()
