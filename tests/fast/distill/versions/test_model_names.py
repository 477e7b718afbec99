"""Two models are never one teacher, though their versions are equal: "1" is what Triton calls the first of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.distill.teachers import Teachers
from tests.fast.distill.conftest import Start, until
from tests.plugins_consul import free_ports

ROWS = 200
SCALES = {"cats": 2.0, "dogs": 3.0}


def reader_of(teachers: Any, cache: SoftLabelCache, **options: Any) -> DistillReader:
    asked = Options(teacher_timeout_s=60, **options)
    return DistillReader(
        ["x", None], ["y"], teachers=teachers, cache=cache, id_field=1, teacher_batch_size=4, options=asked
    )


def source(pause: Callable[[], None], pause_at: int = 20) -> Callable[[], Iterator[Any]]:
    def samples() -> Iterator[Any]:
        for number in range(1, ROWS):
            if number == pause_at:
                pause()
            yield np.full(4, number, np.float32), number

    return samples


def scales(rows: list[Any]) -> set[float]:
    return {float(y[0]) / number for _, number, y in rows}


def kept(cache: SoftLabelCache) -> dict[str, set[float]]:
    """For each model in the cache, the scales of its labels."""
    found = {}
    for key in cache.keys():  # noqa: SIM118 - not a mapping
        view = cache.view(key)
        ids = [number for number in range(1, ROWS) if view.contains([number])[0]]
        labels: Any = view.get(ids).outputs["y"]
        found[key.model] = set((labels[:, 0] / np.asarray(ids)).tolist())
    return found


@pytest.mark.parametrize("mixed_versions", ["warn", "refuse"])
def test_two_models_of_one_service(
    start: Start,
    registry_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mixed_versions: str,
) -> None:
    for name, scale in SCALES.items():
        start("echo", scale=scale, name=name, version="1", service="animals", discovery=registry_url)
    teachers = Teachers("animals", discovery=registry_url)
    with SoftLabelCache(0, tmp_path / "labels") as cache:
        with reader_of(teachers, cache, mixed_versions=mixed_versions) as reader:

            def both() -> bool:
                states = [teacher.state for teacher in reader.stats().teachers.values()]
                return len(states) == 2 and "connecting" not in states

            reader.set_sample_generator(source(lambda: until(both, 30)))
            found = scales(list(reader()))
        assert len(found) == 1, "labels of two models in one epoch"
    with SoftLabelCache(0, tmp_path / "labels") as cache:
        (model,) = [name for name, scale in SCALES.items() if {scale} == found]
        assert kept(cache) == {model: found}, "labels under the name of another model"
    words = [record.getMessage() for record in caplog.records]
    assert any("two models" in text and "'cats'" in text and "'dogs'" in text for text in words), words


@pytest.mark.parametrize("version", ["", "1"])
def test_another_model_takes_the_port(start: Start, version: str) -> None:
    cats = start("echo", scale=2.0, name="cats", version="1", port=free_ports(1)[0])
    words: set[str] = set()

    def set_aside() -> bool:
        (teacher,) = reader.stats().teachers.values()
        words.add(teacher.why)
        return teacher.state != "connecting"

    def replaced() -> None:
        cats.kill()
        dogs = start("echo", scale=3.0, name="dogs", version="1", port=cats.port)
        until(set_aside, 30)
        dogs.kill()
        start("echo", scale=2.0, name="cats", version="1", port=cats.port)

    teachers = Teachers(endpoints=(cats.endpoint,), version=version)
    with SoftLabelCache() as cache, reader_of(teachers, cache) as reader:
        reader.set_sample_generator(source(replaced))
        assert scales(list(reader())) == {2.0}, "labels of dogs among those of cats"
        cache.flush()
        assert kept(cache) == {"cats": {2.0}}, "labels of dogs under the name of cats"
    assert any("it serves model 'dogs'" in why and "'cats'" in why for why in words), words
