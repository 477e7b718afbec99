"""The models that `edl.testing` offers: what they answer, and how long they take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from edl.testing import models

X = np.arange(12, dtype=np.float32).reshape(3, 4)


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
    first, again, other = (
        slept(models.echo(delay_s=0.01, straggle=0.25, straggle_factor=8, seed=seed)) for seed in (1, 1, 2)
    )
    assert set(first) == {0.01, 0.08}
    assert 60 < first.count(0.08) < 140
    assert first == again != other
