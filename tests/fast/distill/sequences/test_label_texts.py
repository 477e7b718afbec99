"""`edl label` of sequences: complete, each text once, resumed after kills, shared by workers, read without teachers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.distill import DistillReader
from edl.distill.cache import SoftLabelCache, load_labels
from edl.testing import LocalTeacher
from edl.testing.models import prefix_scores_of
from tests.fast.distill.conftest import until
from tests.fast.distill.sequences.corpus import sequences

TEXTS = sequences(300)


@pytest.fixture
def teacher() -> Iterator[LocalTeacher]:
    with LocalTeacher("prefix_scores", max_batch=512) as found:
        yield found


def write(path: Path, texts: list[np.ndarray] = TEXTS) -> Path:
    lines = [json.dumps({"id": f"t{number}", "input_ids": text.tolist()}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def command(data: Any, output: Path, teacher: str, *more: str) -> list[str]:
    wanted = ["--inputs", "ids=input_ids", "--outputs", "logprobs", "--ids", "id"]
    return ["label", str(data), *wanted, "--output", str(output), "--teachers", teacher, *more]


def check(folder: Path, texts: list[np.ndarray] = TEXTS) -> None:
    labels = load_labels(folder)
    assert len(labels) == sum(bool(len(text)) for text in texts)
    there = [number for number, text in enumerate(texts) if len(text)]
    inputs = {"ids": [texts[number] for number in there]}
    for number, found in zip(there, labels.of_sequences([f"t{number}" for number in there], inputs), strict=True):
        assert found["logprobs"].tolist() == prefix_scores_of(texts[number]).tolist(), f"text {number}"


def test_each_text_is_labelled_once(teacher: LocalTeacher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "labels"
    texts = [*TEXTS, np.empty(0, np.int32)]
    data = write(tmp_path / "t.jsonl", texts)
    assert main(command(data, folder, teacher.endpoint)) == 0
    said = capsys.readouterr().out
    assert "300 sequences labelled by" in said
    assert "1 of 301 sequences have no token, and so no label" in said
    assert "padded(ids, attention_mask)" in said
    check(folder, texts)
    edited = [*texts[:-1], np.array([4, 4])]
    edited[7] = edited[7][::-1] + 1
    assert main(command(write(data, edited), folder, teacher.endpoint)) == 0
    assert "2 sequences labelled by" in capsys.readouterr().out  # whose texts changed, whatever their ids
    check(folder, edited)

    def samples() -> Any:
        return ((text, f"t{number}") for number, text in enumerate(edited))

    teacher.close()
    with SoftLabelCache(0, folder) as cache:
        reader = DistillReader(["ids", None], ["logprobs"], cache=cache, id_field=1).set_sequence_generator(samples)
        with reader:
            assert sum(len(labels) for _, _, labels in reader()) == reader.stats().rows_cached


def test_data_of_the_other_kind_are_refused(
    teacher: LocalTeacher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "rows.npz", input_ids=np.zeros((4, 3), np.int32), id=np.arange(4))
    assert main(command(tmp_path / "rows.npz", tmp_path / "labels", teacher.endpoint)) == 2
    assert "the data set has rows, and the teachers' model 'm' takes sequences" in capsys.readouterr().err
    with LocalTeacher("echo") as rows:
        asked = command(write(tmp_path / "t.jsonl"), tmp_path / "labels", rows.endpoint)
        other = {"ids=input_ids": "x=input_ids", "logprobs": "y"}
        assert main([other.get(word, word) for word in asked]) == 2
    assert "has sequences, and the teachers' model 'm' takes rows" in capsys.readouterr().err
    assert not (tmp_path / "labels").exists() or not list((tmp_path / "labels").rglob("*.safetensors"))


def test_a_dataset_and_offsets(teacher: LocalTeacher, tmp_path: Path) -> None:
    """A Dataset of texts, by two processes, and the same texts in an .npz file, whose labels it has then."""
    (tmp_path / "corpus.py").write_text(
        "from tests.fast.distill.sequences.corpus import sequences\ndef texts():\n    return sequences(40)\n"
    )
    wanted = ["--outputs", "logprobs", "--output", str(tmp_path / "labels"), "--teachers", teacher.endpoint]
    source = f"{tmp_path / 'corpus.py'}:texts"
    assert main(["label", source, "--inputs", "ids", "--sequences", "--workers", "2", *wanted]) == 0
    texts = sequences(40)
    begins = np.cumsum([0, *map(len, texts)])
    np.savez(tmp_path / "t.npz", tokens=np.concatenate(texts), begins=begins)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert main(["label", str(tmp_path / "t.npz"), "--inputs", "ids=tokens", "--offsets", "begins", *wanted]) == 0
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    found = load_labels(tmp_path / "labels").of_sequences(range(40), {"ids": texts})
    for text, labels in zip(texts, found, strict=True):
        assert labels["logprobs"].tolist() == prefix_scores_of(text).tolist()


def test_workers_are_killed(tmp_path: Path) -> None:
    """Two workers share the run, one is killed with -9 and another comes; each text has its own label, in one file."""
    data, folder = write(tmp_path / "t.jsonl"), tmp_path / "labels"
    with LocalTeacher("prefix_scores", max_batch=64, delay_s=0.1) as slow:
        more = ["--store", f"sqlite:///{tmp_path}/store.sqlite", "--job", "texts", "--shard", "8", "--batch", "4"]
        arguments = command(data, folder, slow.endpoint, *more, "--worker-timeout", "2")
        workers: list[subprocess.Popen[bytes]] = []

        def begin() -> None:
            workers.append(subprocess.Popen([sys.executable, "-m", "edl", *arguments], stderr=subprocess.PIPE))

        try:
            begin()
            begin()
            until(lambda: len(list(folder.rglob("*.safetensors"))) >= 2, 120)
            workers[0].send_signal(signal.SIGKILL)
            begin()
            for worker in workers[1:]:
                said = worker.communicate(timeout=200)[1].decode()
                assert worker.returncode == 0, said
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(10)
                if worker.stderr is not None:
                    worker.stderr.close()
    check(folder)
