"""The smaller examples are run as their READMEs say, with processes that are killed where that is what they show."""

from __future__ import annotations

import csv
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs.examples.running import EXAMPLES, WAIT_S, Example, right, waits_for
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


def test_examples_have_readme_and_test() -> None:
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for folder in (path for path in EXAMPLES.iterdir() if path.is_dir()):
        assert (folder / "README.md").exists()
        assert f"def test_{folder.name}(" in tested, f"no test runs examples/{folder.name}"


def test_digits(tmp_path: Path) -> None:
    example = Example("digits", tmp_path, "torch", "sklearn")
    train_teacher, serve, train_student = example.commands
    assert right(example.run(train_teacher)) > 0.95
    with example.served("server", serve):
        told = example.run(train_student)
    assert right(told) > 0.95
    assert "35,910 rows" in told  # 30 epochs of 1,197 images


def test_train(tmp_path: Path) -> None:
    example = Example("train", tmp_path, "torch", "sklearn", "pyarrow")
    prepare, serve, alone, distilled = example.commands
    example.run(prepare)
    with example.served("server", serve):
        accuracies = [re.findall(r"accuracy ([\d.]+)", example.run(command))[-1] for command in (alone, distilled)]
    assert 0.88 < float(accuracies[0]) < float(accuracies[1]) - 0.01


def test_elastic(tmp_path: Path) -> None:
    """Start it, add a node, kill the first, and watch accuracy go on."""
    example = Example("elastic", tmp_path, "torch", "sklearn")
    # More epochs than anybody waits for, lest the job ends before the second node is there, which imports torch first.
    command = [*example.commands[0][:-1], "100000"]
    with example.started("first", command) as first:
        waits_for(first, "epoch 0")
        with example.started("second", command) as second:
            waits_for(first, "by 2 workers")
            first.kill()
            wait_until(lambda: len(re.findall(r"epoch \d+: .* by one", second.output)) >= 10, "the second goes on")
            second.process.terminate()
            assert second.wait() == 143, second.output
    epochs, later = (
        re.findall(r"epoch (\d+): ([\d.]+)% right, [\d,]+ images in [\d.]+ s by (\w+)", node.output)
        for node in (first, second)
    )
    told = [int(epoch) for epoch, _, _ in epochs + later]  # those whose ends were not saved yet are told twice
    assert sorted(set(told)) == list(range(max(told) + 1)), first.output + second.output
    assert len(told) <= len(set(told)) + 4
    assert later[-1][2] == "one"
    assert float(later[-1][1]) > 90


def test_shards(tmp_path: Path) -> None:
    """Several workers count, one of them is killed, and the sum is right."""
    example = Example("shards", tmp_path)
    write, lead, count, total = example.commands
    example.run([*write[:-1], "4000"])
    counts = example.folder / "counts"
    with example.started("master", lead) as master, example.started("killed", count) as killed:
        wait_until(lambda: len(list(counts.glob("*.json"))) >= 3, "three shards are counted")
        with example.started("one", count) as one, example.started("two", count) as two:
            wait_until(lambda: len(list(counts.glob("*.json"))) >= 10, "ten shards are counted")
            killed.kill()
            assert [node.wait() for node in (one, two, master)] == [0, 0, 0], master.output
    assert all(re.search(r"counted [\d,]+ rows", node.output) for node in (one, two))
    assert "4,000 units done" in master.output
    expected: dict[str, Counter[str]] = {}
    with (example.folder / "reviews.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            expected.setdefault(row["label"], Counter()).update(re.findall(r"[a-z]+", row["sentence"]))
    text = example.run(total)
    for label, words in expected.items():
        ((word, most),) = words.most_common(1)
        assert f"{label}: {sum(words.values()):,} words, most often {word} {most:,}," in text


def test_paddle(tmp_path: Path) -> None:
    """A trainer joins, and one is killed."""
    example = Example("paddle", tmp_path, "paddle", "torch", "sklearn")
    hurry = example.folder / "hurry"
    # It waits in each step, for a person to have time to watch: here until there is nothing left to watch.
    student, waits = example.folder / "train_student.py", "time.sleep(options.pause)"
    assert waits in student.read_text()
    hurries = f"time.sleep(0 if __import__('os').path.exists({str(hurry)!r}) else options.pause)"
    student.write_text(student.read_text().replace(waits, hurries))
    train_teacher, serve, train_student = example.commands
    train_student = ["0.2" if word == "0.05" else word for word in train_student]
    assert right(example.run(train_teacher)) > 0.9
    with example.served("server", serve), example.started("one", train_student) as one:
        waits_for(one, r"1 trainers go on after step -1")
        with example.started("two", train_student) as two:
            began = waits_for(one, r"2 trainers go on after step (\d+)")
            os.kill(two.workers[0], signal.SIGKILL)
            waits_for(one, r"(?s)2 trainers .*2 trainers go on after step (\d+)")
            assert int(began[1]) >= 0
            hurry.touch()
            for node in (one, two):
                assert node.wait(WAIT_S) == 0, node.output
    assert right(one.output.rpartition("student: ")[2]) > 0.9
    steps = [int(step) for step in re.findall(r"trainers go on after step (-?\d+)", one.output)]
    assert steps == sorted(steps)
