"""`edl label` of sequences: complete, each text once, and read without teachers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.distill import DistillReader
from edl.distill.cache import SoftLabelCache, load_labels
from edl.testing.models import prefix_scores_of
from tests.fast.distill.conftest import Serve, Served
from tests.fast.distill.sequences.language_model import sequences

TEXTS = sequences(200)


@pytest.fixture
def teacher(serve: Serve) -> Served:
    return serve("prefix_scores", {"max_batch_rows": 512})


def write(path: Path, texts: list[np.ndarray] = TEXTS) -> Path:
    lines = [json.dumps({"id": f"t{number}", "input_ids": text.tolist()}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def command(data: Any, output: Path, teacher: str, *more: str) -> list[str]:
    wanted = ["--inputs", "ids=input_ids", "--outputs", "logprobs", "--ids", "id"]
    return ["label", str(data), *wanted, "--output", str(output), "--teachers", teacher, *more]


def check(folder: Path, texts: list[np.ndarray] = TEXTS) -> None:
    labels = load_labels(folder)
    there = [number for number, text in enumerate(texts) if len(text)]
    assert len(labels) == len(there)
    inputs = {"ids": [texts[number] for number in there]}
    for number, found in zip(there, labels.of_sequences([f"t{number}" for number in there], inputs), strict=True):
        assert found["logprobs"].tolist() == prefix_scores_of(texts[number]).tolist(), f"text {number}"


def test_each_text_is_labelled_once(teacher: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "labels"
    texts = [*TEXTS, np.empty(0, np.int32)]
    data = write(tmp_path / "t.jsonl", texts)
    assert main(command(data, folder, teacher.endpoint)) == 0
    said = capsys.readouterr().out
    assert "200 sequences labelled by" in said
    assert "1 of 201 sequences have no token, and so no label" in said
    assert "padded(ids, attention_mask)" in said
    check(folder, texts)
    edited = [*texts[:-1], np.array([4, 4])]
    edited[7] = edited[7][::-1] + 1
    assert main(command(write(data, edited), folder, teacher.endpoint)) == 0
    assert "2 sequences labelled by" in capsys.readouterr().out  # whose texts changed, whatever their ids
    check(folder, edited)
    teacher.close()
    with SoftLabelCache(0, folder) as cache:
        reader = DistillReader(["ids", None], ["logprobs"], cache=cache, id_field=1)
        with reader.set_sequence_generator(lambda: ((text, f"t{number}") for number, text in enumerate(edited))):
            assert sum(len(labels) for _, _, labels in reader()) == reader.stats().rows_cached


def test_data_of_the_other_kind_are_refused(
    teacher: Served, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "rows.npz", input_ids=np.zeros((4, 3), np.int32), id=np.arange(4))
    assert main(command(tmp_path / "rows.npz", tmp_path / "labels", teacher.endpoint)) == 2
    assert "the data set has rows, and the teachers' model 'm' takes sequences" in capsys.readouterr().err
    asked = command(write(tmp_path / "t.jsonl"), tmp_path / "labels", serve("echo").endpoint)
    other = {"ids=input_ids": "x=input_ids", "logprobs": "y"}
    assert main([other.get(word, word) for word in asked]) == 2
    assert "has sequences, and the teachers' model 'm' takes rows" in capsys.readouterr().err
    assert not (tmp_path / "labels").exists() or not list((tmp_path / "labels").rglob("*.safetensors"))


def test_a_dataset_and_offsets(teacher: Served, tmp_path: Path) -> None:
    """A function of texts, and the same texts in an .npz file, whose labels it has then."""
    program = "from tests.fast.distill.sequences.language_model import sequences\n\n\ndef texts():\n"
    (tmp_path / "corpus.py").write_text(program + "    return sequences(40)\n")
    wanted = ["--outputs", "logprobs", "--output", str(tmp_path / "labels"), "--teachers", teacher.endpoint]
    assert main(["label", f"{tmp_path / 'corpus.py'}:texts", "--inputs", "ids", "--sequences", *wanted]) == 0
    texts = sequences(40)
    np.savez(tmp_path / "t.npz", tokens=np.concatenate(texts), begins=np.cumsum([0, *map(len, texts)]))
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert main(["label", str(tmp_path / "t.npz"), "--inputs", "ids=tokens", "--offsets", "begins", *wanted]) == 0
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    found = load_labels(tmp_path / "labels").of_sequences(range(40), {"ids": texts})
    for text, labels in zip(texts, found, strict=True):
        assert labels["logprobs"].tolist() == prefix_scores_of(text).tolist()
