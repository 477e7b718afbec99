"""What the demo claims about samples and throughput, on deliveries that were spoiled on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")


from edl.cli.demo import models  # noqa: E402
from edl.cli.demo.models import DemoPlan, Digits, Findings, check  # noqa: E402

PLAN = DemoPlan(Path("unused"), seeds=2, steps=5, rows=4)
RIGHT = Findings(checked=40, lost=0, repeated=0, changed=0, mislabelled=0, out_of_order=0, largest_difference=0.0)
Batch = list[np.ndarray]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return models.load()


@pytest.fixture(scope="module")
def teacher() -> models.Teacher:
    torch.manual_seed(0)
    return models.Teacher().eval()


@pytest.fixture
def batches(digits: Digits, teacher: models.Teacher) -> list[Batch]:
    with torch.no_grad():
        return [
            [image, label, number, teacher(torch.from_numpy(image)).numpy()]
            for image, label, number in models.batches(digits, PLAN)
        ]


def found(batches: list[Batch], digits: Digits, teacher: models.Teacher) -> Findings:
    return replace(check(PLAN, [tuple(batch) for batch in batches], digits, teacher), largest_difference=0.0)


def test_a_faultless_delivery(batches: list[Batch], digits: Digits, teacher: models.Teacher) -> None:
    findings = found(batches, digits, teacher)
    assert findings == RIGHT
    assert findings.all_well
    lost = batches[:3] + batches[4:]
    assert found(lost, digits, teacher) == replace(RIGHT, checked=36, lost=4)
    repeated = [*batches[:4], *batches[3:]]
    assert found(repeated, digits, teacher) == replace(RIGHT, checked=44, repeated=4, out_of_order=3)
    swapped = [*batches[:3], batches[4], batches[3], *batches[5:]]
    assert found(swapped, digits, teacher) == replace(RIGHT, out_of_order=4)


def test_spoiled_samples_are_found(batches: list[Batch], digits: Digits, teacher: models.Teacher) -> None:
    batches[2][3][[0, 1]] = batches[2][3][[1, 0]]
    findings = found(batches, digits, teacher)
    assert findings == replace(RIGHT, mislabelled=2)
    assert not findings.all_well
    batches[4][3][0] = np.nan
    assert found(batches, digits, teacher).mislabelled == 3, "NaN is no label"
    batches[0][1][2] += 1
    batches[1][0] = batches[1][0] + np.float32(1e-6)
    assert found(batches, digits, teacher).changed == 5
