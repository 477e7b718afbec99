"""Teachers of several models and versions: each label is kept under its own, and epochs follow the teachers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli.label import main
from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.options import Policy
from edl.distill.teachers import Teachers
from edl.errors import EDLError, SettingsError
from tests.fast.distill.conftest import Serve, Served
from tests.fast.distill.teachers.foreign import ForeignServer
from tests.waiting import DEADLINE_S, wait_until

ROWS = 80
FOLLOWED = "from this epoch on"
SOON = Policy(aside_s=0.1, open_min_s=0.1)
"""A teacher with a wrong answer is asked again soon, and not after half a minute."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who asks the teachers for their version gives up after a second, and stays with the one that it knows.
    monkeypatch.setattr("edl.distill.engine.engine._REFRESH_TIMEOUT_S", DEADLINE_S)


def source(pause_at: int = ROWS, go_on: threading.Event | None = None) -> Callable[[], Iterator[Any]]:
    def samples() -> Iterator[Any]:
        for number in range(ROWS):
            if number == pause_at and go_on is not None:
                assert go_on.wait(DEADLINE_S)
            yield np.full(4, number, np.float32), number

    return samples


def reader_of(
    teachers: Any,
    cache: SoftLabelCache | None = None,
    *,
    policy: Policy = SOON,
    mixed: Any = "warn",
    rows: Callable[[], Iterator[Any]] | None = None,
    **settings: Any,
) -> DistillReader:
    if cache is not None:
        settings |= {"cache": cache, "id_field": 1}
    options = Options(teacher_timeout_s=60, policy=policy, mixed_versions=mixed)
    reader = DistillReader(["x", None], ["y"], teachers=teachers, teacher_batch_size=4, options=options, **settings)
    return reader.set_sample_generator(rows or source())


def scales(rows: list[Any]) -> set[float]:
    """What the labels of these rows were multiplied with; 0 tells nothing."""
    return {float(y[0]) / number for _, number, y in rows if number}


def kept(cache: SoftLabelCache, by: str = "version") -> dict[str, set[float]]:
    """For each version, or model, in the cache, the scales of its labels."""
    found: dict[str, set[float]] = {}
    for key in cache.keys():  # noqa: SIM118 - not a mapping
        view = cache.view(key)
        ids = [number for number in view.ids() if number]
        labels: Any = view.get(ids).outputs["y"]
        found[getattr(key, by)] = {float(y[0]) / int(number) for number, y in zip(ids, labels, strict=True)}
    return found


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in text for text in caplog.messages)


# Teachers that are replaced by those of another version.


def test_replaced_between_epochs_is_asked(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Though all was in the cache."""
    first = serve("echo")
    with SoftLabelCache() as cache, reader_of(first.endpoint, cache) as reader:
        for _ in range(2):
            assert scales(list(reader())) == {1.0}
        assert reader.stats().rows_asked == ROWS
        first.close()
        serve("echo", version="2", scale=3.0, server={"port": first.port})
        for _ in range(2):
            assert scales(list(reader())) == {3.0}
        assert reader.stats().rows_asked == 2 * ROWS
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}
    assert said(caplog, FOLLOWED) == 1
    assert not said(caplog, "two models are mixed")


# Teachers of two versions, or models, side by side.


@pytest.fixture
def two(serve: Serve) -> dict[str, Served]:
    return {"1": serve("echo", delay_s=0.005), "2": serve("echo", version="2", scale=3.0, delay_s=0.005)}


def test_first_of_mixed_versions_counts(two: dict[str, Served], caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    # Else one that has come to a stop may be answered for, and all be of one version.
    settings: Any = {"policy": Policy(hedge_budget=0), "rows": source(8, go_on)}
    endpoints = [teacher.endpoint for teacher in two.values()]
    with SoftLabelCache() as cache, reader_of(endpoints, cache, **settings) as reader:
        epoch = reader()
        next(epoch)  # else all may be in the cache before the other one is connected to
        wait_until(lambda: reader.stats().teachers_live == 2)
        go_on.set()
        list(epoch)
        for _ in range(10):
            list(reader())
        (only,) = {key.version for key in cache.keys() if cache.view(key).hits}  # noqa: SIM118 - not a mapping
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}, "each label is kept under the version of its answer"
        assert said(caplog, "the teachers of") == 1, "that versions are mixed is said once"
        two[only].close()
        assert scales(list(reader())) == {4.0 - {"1": 1.0, "2": 3.0}[only]}
        assert kept(cache) == {"1": {1.0}, "2": {3.0}}
    assert said(caplog, FOLLOWED) == 1


def test_own_teachers_of_two_versions(two: dict[str, Served], caplog: pytest.LogCaptureFixture) -> None:
    """Where a mixture is refused, each epoch is of one version; when that is gone, the next one is of the other."""
    with reader_of([teacher.endpoint for teacher in two.values()], mixed="refuse") as reader:
        (only,) = scales(list(reader()))
        wait_until(lambda: "set aside" in {teacher.state for teacher in reader.stats().teachers.values()})
        for _ in range(3):
            assert scales(list(reader())) == {only}
        two[{1.0: "1", 3.0: "2"}[only]].close()
        assert scales(list(reader())) == {4.0 - only}
    assert said(caplog, "mixed_versions='refuse'"), "why a teacher is not used"


def test_a_pinned_version_of_own_teachers(two: dict[str, Served]) -> None:
    for version, scale in (("1", 1.0), ("2", 3.0)):
        with reader_of([teacher.endpoint for teacher in two.values()], version=version) as reader:
            for _ in range(2):
                assert scales(list(reader())) == {scale}
    ensemble = [Teachers(endpoints=(teacher.endpoint,), version=version) for version, teacher in two.items()]
    with reader_of(ensemble, version="7") as reader:
        rows = list(reader())
    assert scales([row[:3] for row in rows]) == {1.0}
    assert scales([(row[0], row[1], row[3]) for row in rows]) == {3.0}, "a group's own version= wins"


# Servers that say little of versions, or something else than they answer.


def test_no_version_no_cache(caplog: pytest.LogCaptureFixture) -> None:
    with ForeignServer(versions=(), named=lambda asked: "") as server, SoftLabelCache() as cache:
        with caplog.at_level(logging.WARNING, "edl.distill"), reader_of(server.endpoint, cache) as reader:
            for _ in range(2):
                assert scales(list(reader())) == {1.0}
            assert reader.stats().rows_asked == 2 * ROWS, "labels of any model that is served there"
            assert reader.stats().rows_not_cached == 2 * ROWS
        assert not cache.keys()
    assert said(caplog, "do not report their model version") == 1


def test_a_version_that_the_user_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ForeignServer(versions=(), named=lambda asked: "") as server:
        with SoftLabelCache() as cache, reader_of(server.endpoint, cache, version="mine") as reader:
            for _ in range(2):
                assert scales(list(reader())) == {1.0}
            assert reader.stats().rows_asked == ROWS
            assert [key.version for key in cache.keys()] == ["mine"]  # noqa: SIM118 - not a mapping
        assert said(caplog, "as set with version="), "it cannot be checked"
        assert set(server.asked) == {""}, "a server that knows no versions is asked for none"
        np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
        asked = [str(tmp_path / "x.npy"), "--teachers", server.endpoint, "--inputs", "x", "--outputs", "y"]
        asked += ["--output", str(tmp_path / "labels")]
        with pytest.raises(SettingsError, match="--model-version"):
            main(asked)
        assert main([*asked, "--model-version", "mine"]) == 0


def test_answers_decide_which_version_it_is() -> None:
    """Of a server that answers with another one than the newest."""
    server = ForeignServer(versions=("1", "2"), named=lambda asked: asked or "1")
    with server, SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        for _ in range(2):
            assert scales(list(reader())) == {1.0}
        wait_until(lambda: kept(cache) == {"1": {1.0}})
        assert reader.stats().rows_asked == ROWS


def test_only_answers_name_the_version(caplog: pytest.LogCaptureFixture) -> None:
    """As MLServer's. Each epoch waits for an answer, since another server may be there by then."""
    server = ForeignServer(versions=(), named=lambda asked: "v1")
    with server, SoftLabelCache() as cache, reader_of(server.endpoint, cache) as reader:
        for epoch in range(3):
            assert scales(list(reader())) == {1.0}
            assert ROWS <= reader.stats().rows_asked <= ROWS + epoch * 2 * 4, "two requests to learn the version"
        server.scale, server.named = 3.0, lambda asked: "v2"
        assert scales(list(reader())) == {3.0}
        wait_until(lambda: {len(cache.view(key).ids()) for key in cache.keys()} == {ROWS})  # noqa: SIM118 - no mapping
        assert kept(cache) == {"v1": {1.0}, "v2": {3.0}}
    assert said(caplog, FOLLOWED) == 1
    assert not said(caplog, "mixed")
    assert not said(caplog, "is lost")


@pytest.mark.parametrize(
    ("pin", "answered", "words"),
    [("1", "2", "version"), ("1", "", "version"), ("", "\x1b[2J" * 1000, "an invalid version")],
    ids=["another", "none", "no name"],
)
def test_answers_of_another_version(pin: str, answered: str, words: str) -> None:
    """A server ignores the version that is asked for, or names none: such an answer is no label."""
    with ForeignServer(versions=("1", "2"), named=lambda asked: answered) as server, SoftLabelCache() as cache:
        with reader_of(server.endpoint, cache, version=pin) as reader, pytest.raises(EDLError, match=words):
            list(reader())
        assert not cache.keys()
    assert set(server.asked) == {pin}, "the version goes with each request"
