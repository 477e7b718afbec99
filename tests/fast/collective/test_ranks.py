"""A worker that forgot its process group is told, before it goes on from a state of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.collective import Checkpointer, State  # noqa: E402
from edl.collective.ranks import exchange, rank_of, world_of  # noqa: E402
from edl.errors import SettingsError  # noqa: E402


@pytest.fixture
def checkpointer() -> Iterator[Checkpointer]:
    with Checkpointer(State(step=-1)) as made:
        yield made


def test_alone_there_is_one_rank() -> None:
    assert (rank_of(None), world_of(None)) == (0, 1)
    assert exchange([3, 4], None, torch.device("cpu")) == [[3, 4]]


def test_restore_before_the_group_is_refused(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoring before the process group is made is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"one of 2 workers.*call init_process_group\(\)"):
        checkpointer.restore()
    with pytest.raises(SettingsError, match=r"call init_process_group\(\)"):
        checkpointer.save(0, force=True)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SettingsError, match=r"import Checkpointer and PaddleState from edl\.collective\.paddle, not"):
        checkpointer.restore()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert checkpointer.restore() == -1
