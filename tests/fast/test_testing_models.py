"""The models that `edl.testing` offers: what they answer, and how long they take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edl.testing import models

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_answers_come_from_their_own_rows() -> None:
    np.testing.assert_array_equal(models.echo(scale=2)({"x": X})["y"], 2 * X)
    np.testing.assert_array_equal(models.linear()({"x": X})["y"], X @ np.arange(16, dtype=np.float32).reshape(4, 4))
    np.testing.assert_array_equal(models.fingerprint()({"x": X})["y"], models.fingerprint_of(X))
    assert models.wrong_width()({"x": X})["y"].shape == (3, 8)
    assert models.wrong_width().outputs == ["y:float32[8]"]
    zeros = models.zeros(classes=5, shape=[2, 2], name="pixels")
    assert zeros.inputs == ["pixels:uint8[2,2]"]
    np.testing.assert_array_equal(zeros({"pixels": np.ones((3, 2, 2), np.uint8)})["logits"], np.zeros((3, 5)))


def test_fingerprints_survive_float16() -> None:
    """And see every byte."""
    rows = np.random.default_rng(0).integers(0, 256, (500, 3 * 32 * 32), np.uint8)
    prints = models.fingerprint_of(rows)
    np.testing.assert_array_equal(prints.astype(np.float16).astype(np.float32), prints)
    for byte in range(0, rows.shape[1], 97):
        changed = rows[:1].copy()
        changed[0, byte] ^= 1
        assert (models.fingerprint_of(changed) != prints[:1]).any()


def test_batches_take_the_time_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their rows, and some take longer, drawn with a seed."""
    times: list[float] = []
    monkeypatch.setattr(models, "time", SimpleNamespace(sleep=times.append, monotonic=lambda: 0.0))

    def slept(model: models.Model, batches: int = 400) -> list[float]:
        times.clear()
        for _ in range(batches):
            model({"x": X})
        return times.copy()

    model = models.echo(delay_s=0.02, row_s=0.01)
    assert slept(model, 1) == [pytest.approx(0.05)]
    assert not model.inline
    assert models.echo().inline
    first, again, other = (
        slept(models.echo(delay_s=0.01, straggle=0.25, straggle_factor=8, seed=seed)) for seed in (1, 1, 2)
    )
    assert set(first) == {0.01, 0.08}
    assert 60 < first.count(0.08) < 140
    assert first == again != other


def test_faults_come_as_told(tmp_path: Path) -> None:
    nan = models.nan(every=2)
    assert [bool(np.isnan(nan({"x": X})["y"]).any()) for _ in range(4)] == [False, True, False, True]
    switch = tmp_path / "broken"
    raises = models.raises(while_exists=str(switch), message="no")
    raises({"x": X})
    switch.touch()
    with pytest.raises(RuntimeError, match="no"):
        raises({"x": X})
    picky = models.wrong_shape(above=6)
    assert picky({"x": X[:2]})["y"].shape == (2, 4)
    assert picky({"x": X})["y"].shape == (3, 5)
    np.testing.assert_array_equal(X, np.arange(12).reshape(3, 4))
