"""A cache when teachers change: labels are those of one version, which follows the teachers from epoch to epoch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.dispatch.policy import Policy
from edl.distill.teachers import Teachers
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.plugins_consul import free_ports

ROWS = 80
TYPED = """
from edl.testing.models import Model


def make(kind, **options):
    return Model(lambda inputs: {"y": inputs["x"].astype(kind)}, ["x:float32[4]"], [f"y:{kind}[4]"], **options)
"""
FOLLOWED = "from this epoch on"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who asks the teachers for their version gives up after a second, and stays with the one that it knows.
    monkeypatch.setattr("edl.distill.engine.engine._REFRESH_TIMEOUT_S", 20.0)


def source(pause_at: int = ROWS, go_on: threading.Event | None = None) -> Callable[[], Iterator[Any]]:
    def samples() -> Iterator[Any]:
        for number in range(ROWS):
            if number == pause_at and go_on is not None:
                assert go_on.wait(60)
            yield np.full(4, number, np.float32), number

    return samples


def reader_of(cache: SoftLabelCache, *teachers: LocalTeacher, policy: Policy | None = None) -> DistillReader:
    return DistillReader(
        ["x", None],
        ["y"],
        teachers=[teacher.endpoint for teacher in teachers],
        cache=cache,
        id_field=1,
        teacher_batch_size=4,
        options=Options(teacher_timeout_s=60, policy=policy or Policy()),
    )


def labelled_by(rows: list[Any]) -> set[float]:
    """The scales of the teachers that labelled these rows; 0 tells nothing."""
    return {float(y[0]) / number for _, number, y in rows if number}


def kept(cache: SoftLabelCache) -> dict[str, set[float]]:
    """For each version in the cache, the scales of its labels."""
    found = {}
    for key in cache.keys():  # noqa: SIM118 - not a mapping
        view = cache.view(key)
        ids = [number for number in range(1, ROWS) if view.contains([number])[0]]
        found[key.version] = {float(view.get([number]).outputs["y"][0, 0]) / number for number in ids}  # type: ignore[index]
    return found


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_replaced_between_epochs_is_asked(start: Start, caplog: pytest.LogCaptureFixture, shared_memory: bool) -> None:
    """A teacher replaced between epochs is asked though all was in the cache."""
    first = start("echo", version="1", port=free_ports(1)[0], serve={"shared-memory": shared_memory})
    with SoftLabelCache() as cache, reader_of(cache, first).set_sample_generator(source()) as reader:
        for _ in range(2):
            assert labelled_by(list(reader())) == {1.0}
        assert reader.stats().rows_asked == ROWS
        first.kill()
        start("echo", version="2", scale=3.0, port=first.port)
        for _ in range(2):
            assert labelled_by(list(reader())) == {3.0}
        assert reader.stats().rows_asked == 2 * ROWS
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}
    assert said(caplog, FOLLOWED) == 1
    assert not said(caplog, "two models are mixed")


def test_replaced_within_an_epoch(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody asks while it is replaced, and gRPC connects to the new one by itself."""
    first, go_on = start("echo", version="1", port=free_ports(1)[0]), threading.Event()
    with SoftLabelCache() as cache, reader_of(cache, first).set_sample_generator(source(40, go_on)) as reader:
        epoch = reader()
        rows = [next(epoch) for _ in range(40)]
        first.kill()
        start("echo", version="2", scale=3.0, port=first.port)
        go_on.set()
        rows += epoch
        assert [number for _, number, _ in rows] == list(range(ROWS))
        assert (labelled_by(rows[:40]), labelled_by(rows[40:])) == ({1.0}, {3.0})
        assert not said(caplog, FOLLOWED)
        asked = reader.stats().rows_asked
        assert labelled_by(list(reader())) == {3.0}
        assert labelled_by(list(reader())) == {3.0}
        assert reader.stats().rows_asked == asked + 40, (
            "the first epoch has kept the others, and the third asks nothing"
        )
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}
    assert said(caplog, FOLLOWED) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_next_epochs_dtype_may_differ(start: Start, tmp_path: Path, cached: bool) -> None:
    """The teachers of the next epoch may give another dtype."""
    (tmp_path / "model.py").write_text(TYPED)
    model, options = f"{tmp_path}/model.py:make", Options(teacher_timeout_s=60)
    first = start(model, version="1", port=free_ports(1)[0], kind="float32")
    with contextlib.ExitStack() as stack:
        kept: dict[str, Any] = {"cache": stack.enter_context(SoftLabelCache()), "id_field": 1} if cached else {}
        reader = DistillReader(["x", None], ["y"], teachers=first.endpoint, options=options, **kept)
        stack.enter_context(reader)
        reader.set_sample_generator(source())
        assert {y.dtype for *_, y in reader()} == {np.dtype("float32")}
        first.kill()
        start(model, version="2", kind="float16", port=first.port)
        assert {y.dtype for *_, y in reader()} == {np.dtype("float16")}


def test_first_of_mixed_versions_counts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """While versions are mixed the first one counts."""
    first = start("echo", version="1", delay_s=0.02)
    second = LocalTeacher("echo", version="2", scale=3.0, delay_s=0.02)
    go_on = threading.Event()
    policy = Policy(hedge_budget=0)  # else one that has come to a stop may be answered for, and all be of one version
    with (
        SoftLabelCache() as cache,
        reader_of(cache, first, second, policy=policy).set_sample_generator(source(8, go_on)) as reader,
    ):
        epoch = reader()
        next(epoch)  # else all may be in the cache before the other one is connected to
        until(lambda: reader.stats().teachers_live == 2, 60)
        go_on.set()
        list(epoch)
        for _ in range(20):
            list(reader())
        (only,) = {key.version for key in cache.keys() if cache.view(key).hits}  # noqa: SIM118 - not a mapping
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}, "each label is kept under the version that its answer names"
        name = "the teachers of"
        assert said(caplog, name) == 1, "that versions are mixed is said once"
        {"1": first, "2": second}[only].kill()
        other = "2" if only == "1" else "1"
        scale = {"1": 1.0, "2": 3.0}[other]
        assert labelled_by(list(reader())) == {scale}
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}
    assert said(caplog, FOLLOWED) == 1
    second.close()


def test_no_teacher_changes_nothing(start: Start) -> None:
    first = start("echo", version="1")
    with SoftLabelCache() as cache, reader_of(cache, first).set_sample_generator(source()) as reader:
        list(reader())
        first.kill()
        assert labelled_by(list(reader())) == {1.0}


def test_own_teachers_of_two_versions(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first, second = start("echo", version="1"), start("echo", version="2", scale=3.0)
    options = Options(teacher_timeout_s=60, mixed_versions="refuse")
    reader = DistillReader(
        ["x", None], ["y"], teachers=[first.endpoint, second.endpoint], teacher_batch_size=1, options=options
    )
    with reader.set_sample_generator(source()):
        (only,) = labelled_by(list(reader()))
        until(lambda: "set aside" in {teacher.state for teacher in reader.stats().teachers.values()}, 60)
        for _ in range(5):
            assert labelled_by(list(reader())) == {only}, "each epoch is of one version"
        {1.0: first, 3.0: second}[only].kill()
        assert labelled_by(list(reader())) == {4.0 - only}, "when the one is gone, the next epoch is of the other"
    assert said(caplog, "mixed_versions='refuse'"), "why a teacher is not used"


def test_version_of_an_unknown_own_model(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    teacher = start("echo", version="", scale=3.0)
    reader = DistillReader(["x", None], ["y"], teachers=teacher.endpoint, version="3", teacher_batch_size=4)
    with reader.set_sample_generator(source()):
        for _ in range(2):
            assert labelled_by(list(reader())) == {3.0}
    assert said(caplog, "as version= names it")


def test_a_pinned_version_of_own_teachers(start: Start) -> None:
    first, second = start("echo", version="1"), start("echo", version="2", scale=3.0)
    teachers = [first.endpoint, second.endpoint]
    for version, scale in (("1", 1.0), ("2", 3.0)):
        reader = DistillReader(["x", None], ["y"], teachers=teachers, version=version)
        with reader.set_sample_generator(source()):
            for _ in range(3):
                assert labelled_by(list(reader())) == {scale}
    ensemble = [Teachers(endpoints=(teachers[0],), version="1"), Teachers(endpoints=(teachers[1],), version="2")]
    with DistillReader(["x", None], ["y"], teachers=ensemble, version="7").set_sample_generator(source()) as reader:
        rows = list(reader())
    assert {float(row[2][0]) / row[1] for row in rows[1:]} == {1.0}
    assert {float(row[3][0]) / row[1] for row in rows[1:]} == {3.0}, "a group's own version= wins"
