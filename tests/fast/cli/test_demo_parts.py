"""What the demo claims about samples and throughput, on deliveries that were spoiled on purpose."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from rich.console import Console  # noqa: E402

from edl.cli import main  # noqa: E402
from edl.cli.demo import data, models, picture  # noqa: E402
from edl.cli.demo.check import Delivered, Findings, check  # noqa: E402
from edl.cli.demo.plan import DemoPlan  # noqa: E402
from edl.cli.demo.timeline import TeacherEvent, Timeline  # noqa: E402
from edl.distill import ReaderStats  # noqa: E402
from edl.distill.stats import TeacherStats  # noqa: E402

PLAN = DemoPlan(Path("unused"), seeds=2, steps=5, rows=4)
RIGHT = Findings(checked=40, lost=0, repeated=0, changed=0, mislabelled=0, out_of_order=0, largest_difference=0.0)

Batch = list[np.ndarray]


@pytest.fixture(scope="module")
def digits() -> data.Digits:
    return data.load()


@pytest.fixture(scope="module")
def teacher() -> models.Teacher:
    torch.manual_seed(0)
    return models.Teacher().eval()


@pytest.fixture
def batches(digits: data.Digits, teacher: models.Teacher) -> list[Batch]:
    """What a faultless reader delivers."""
    with torch.no_grad():
        return [
            [image, label, number, teacher(torch.from_numpy(image)).numpy()]
            for image, label, number in data.batches(digits, PLAN)
        ]


def found(batches: list[Batch], digits: data.Digits, teacher: models.Teacher) -> Findings:
    delivered = Delivered(PLAN)
    for batch in batches:
        delivered.add(*batch)
    return replace(check(delivered, digits, teacher), largest_difference=0.0)


def test_a_faultless_delivery(batches: list[Batch], digits: data.Digits, teacher: models.Teacher) -> None:
    findings = found(batches, digits, teacher)
    assert findings == RIGHT
    assert findings.all_well
    lost = batches[:3] + batches[4:]
    assert found(lost, digits, teacher) == replace(RIGHT, checked=36, lost=4)
    repeated = [*batches[:4], *batches[3:]]
    assert found(repeated, digits, teacher) == replace(RIGHT, checked=44, repeated=4, out_of_order=3)
    swapped = [*batches[:3], batches[4], batches[3], *batches[5:]]
    assert found(swapped, digits, teacher) == replace(RIGHT, out_of_order=4)


def test_swapped_soft_labels_are_found(batches: list[Batch], digits: data.Digits, teacher: models.Teacher) -> None:
    batches[2][3][[0, 1]] = batches[2][3][[1, 0]]
    findings = found(batches, digits, teacher)
    assert findings == replace(RIGHT, mislabelled=2)
    assert not findings.all_well
    batches[4][3][0] = np.nan
    assert found(batches, digits, teacher).mislabelled == 3, "NaN is no label"


def test_changed_image_or_label_is_found(batches: list[Batch], digits: data.Digits, teacher: models.Teacher) -> None:
    batches[0][1][2] += 1
    batches[1][0] = batches[1][0] + np.float32(1e-6)
    assert found(batches, digits, teacher).changed == 5


def test_epoch_follows_its_seed(digits: data.Digits) -> None:
    """The epoch is the same each time and differs between seeds."""
    one, other = list(data.batches(digits, PLAN)), list(data.batches(digits, PLAN))
    for batch, again in zip(one, other, strict=True):
        for field, same in zip(batch, again, strict=True):
            np.testing.assert_array_equal(field, same)
    assert not np.array_equal(one[0][0], one[1][0])
    assert set(digits.share(0, 100).tolist()) != set(digits.share(1, 100).tolist())


def test_students_differ_by_labels_only() -> None:
    """Both students start equal and only the labels make the difference."""
    pair = models.ModelPair(seed=3, steps=10, temperature=4.0)
    image = torch.rand(8, 1, 8, 8)
    assert torch.equal(pair.alone(image), pair.distilled(image))
    pair.step(image, torch.zeros(8, dtype=torch.int64), torch.randn(8, 10))
    assert not torch.equal(pair.alone(image), pair.distilled(image))


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """Counters that grow by 100 rows a second, from two teachers, for 0.7 s."""
    monkeypatch.setattr("edl.cli.demo.timeline.BackgroundLoop", lambda *_: io.BytesIO())  # never runs
    now_s = 0.0

    def count() -> ReaderStats:
        half = TeacherStats("127.0.0.1:1", "ready", rows=round(50 * now_s))
        return ReaderStats(rows_delivered=round(100 * now_s), teachers={"a": half, "b": half})

    with Timeline(count, clock=lambda: now_s) as timeline:
        for _ in range(7):
            now_s += 0.1
            timeline._sample()
        timeline.events += [
            TeacherEvent(0.2, "kill", "a"),
            TeacherEvent(0.21, "join", "c"),
            TeacherEvent(0.4, "drain", "b"),
        ]
    return timeline


def test_rates_are_rows_a_second(timeline: Timeline) -> None:
    rates = timeline.rates(0.2)
    assert list(rates.served) == ["a", "b"]
    assert rates.delivered.mean() == pytest.approx(100, rel=0.05)
    assert sum(rates.served.values()).mean() == pytest.approx(100, rel=0.05)
    np.testing.assert_allclose(np.diff(rates.at_s), 0.2)


def test_the_picture_is_drawn_in_both_ways(timeline: Timeline, tmp_path: Path) -> None:
    picture.draw(timeline, tmp_path / "demo.png", "40 samples")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    timeline.events.append(TeacherEvent(timeline.end_s - 0.01, "join", "teacher-late"))
    picture.show(timeline, Console(file=out, width=80))
    for words in ("kill a", "join c", "drain b", "join teacher-late"):
        assert words in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--teachers", "1"], ["--teacher-ms", "-3"]])
def test_numbers_that_make_no_sense(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *wrong]) == 2
    error = capsys.readouterr().err
    assert " ".join(wrong[:1]) in error
    assert error.count("\n") == 1
