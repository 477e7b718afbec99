"""What the integrations of trainers share: saves where a step begins, and none of a broken step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edl.collective.checkpoint.state.state import State
from edl.collective.loop_position import BoundaryCheckpointer
from edl.errors import SettingsError


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop has begun in this process."""
    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)


def boundary_of(folder: Path) -> BoundaryCheckpointer:
    return BoundaryCheckpointer({"storage": str(folder), "interval_steps": 1, "storage_interval_s": 1e-6})


@pytest.mark.parametrize(("ended", "stored"), [(False, 1.0), (True, 777.0)])
def test_broken_step_is_not_stored(tmp_path: Path, ended: bool, stored: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed in the middle of a step, and after the end."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 1.0)
    boundary = boundary_of(tmp_path)
    boundary.open(State(model=model))
    for step in range(3):
        boundary.count_step()
        boundary.begin_step(step)
    torch.nn.init.constant_(model.weight, 777.0)
    if ended:
        boundary.save_end(3)
    boundary.close()

    monkeypatch.setattr(BoundaryCheckpointer, "_opened", False)  # the next process
    again = torch.nn.Linear(2, 2)
    boundary = boundary_of(tmp_path)
    assert boundary.open(State(model=again))
    boundary.close()
    assert again.weight.flatten().tolist() == [stored] * 4


def test_a_second_loop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find the end of the first one, which a restart of that is to find, and train nothing."""
    state = State(model=torch.nn.Linear(2, 2))
    for _ in range(2):  # nothing is kept
        boundary = BoundaryCheckpointer({})
        assert not boundary.open(state)
        boundary.close()
    monkeypatch.setenv("EDL_SLOTS", str(tmp_path / "slots"))
    first = BoundaryCheckpointer({})
    first.open(state)
    first.save_end(0)
    first.close()
    for second in (BoundaryCheckpointer({}), boundary_of(tmp_path / "stored")):
        with pytest.raises(SettingsError, match=r"keeps the state of one training loop.*job of its own"):
            second.open(state)
