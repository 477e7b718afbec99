"""What every backend must do, run over every form of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.errors import SettingsError
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import Backend, TensorSpec
from tests.integration.backends.models import FORMS, IN, OUT, expected

Sources = dict[tuple[str, int], ModelSource]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if "paddle" in name:
        pytest.importorskip("paddle", reason="PaddlePaddle is not installed: pip install paddlepaddle")
    return name


@pytest.fixture(scope="module")
def source(form: str, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return FORMS[form](tmp_path_factory.mktemp(form), 0)


@pytest.fixture(scope="module")
def backend(source: ModelSource) -> Iterator[Backend]:
    (opened,) = open_backends(source)
    opened.warm_up(8)
    yield opened
    opened.close()


def rows(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, IN)).astype(np.float32)


def test_names_types_and_shapes_are_those_of_the_model(backend: Backend) -> None:
    assert backend.inputs == (TensorSpec("x", "FP32", (IN,)),)
    assert backend.outputs == (TensorSpec("logits", "FP32", (OUT,)),)
    assert backend.platform


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 64])
def test_any_number_of_rows_is_answered_row_by_row(backend: Backend, count: int) -> None:
    x = rows(count)
    answer = backend.predict({"x": x})
    logits = answer["logits"]
    assert logits.dtype == np.float32
    assert logits.shape == (count, OUT)
    np.testing.assert_allclose(logits, expected(x), rtol=1e-5, atol=1e-6)


def test_read_only_and_unaligned_inputs_are_taken_and_left_alone(backend: Backend) -> None:
    x = rows(6)
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    np.testing.assert_allclose(backend.predict({"x": frozen})["logits"], expected(x), rtol=1e-5, atol=1e-6)
    odd = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not odd.flags.aligned
    np.testing.assert_allclose(backend.predict({"x": odd})["logits"], expected(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(frozen, x)


def test_an_answer_stays_what_it_is_when_its_inputs_are_written_again(backend: Backend) -> None:
    x = rows(5)
    logits = backend.predict({"x": x})["logits"]
    wanted = expected(x)
    x[:] = np.nan
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)


def test_the_same_model_has_the_same_version_and_other_weights_another(
    form: str, source: ModelSource, backend: Backend, tmp_path: Path
) -> None:
    (again,) = open_backends(source)
    (other,) = open_backends(FORMS[form](tmp_path, 7))
    (named,) = open_backends(dataclasses.replace(source, version="mine"))
    assert again.version == backend.version
    assert other.version != backend.version
    assert named.version == "mine"
    x = rows(3)
    np.testing.assert_allclose(other.predict({"x": x})["logits"], expected(x, 7), rtol=1e-5, atol=1e-6)
    for opened in (again, other, named):
        opened.close()


def test_what_does_not_exist_is_named(source: ModelSource, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing_here")
    target = f"{missing}.py:f" if ":" in source.target else missing
    with pytest.raises(SettingsError, match="nothing_here"):
        open_backends(dataclasses.replace(source, target=target))


def test_settings_that_mean_nothing_to_a_backend_are_refused(source: ModelSource) -> None:
    unknown = {"checkpoint": "w.pt"} if source.kind != "torch-factory" else {}
    unknown |= {"normalize": "imagenet"} if source.kind in ("callable", "factory", "paddle") else {}
    for field, value in unknown.items():
        with pytest.raises(SettingsError, match=rf"--{field} means nothing to --{source.kind}"):
            open_backends(dataclasses.replace(source, **{field: value}))
    if source.device is not None:
        with pytest.raises(SettingsError, match="--device 'tpu:9'"):
            open_backends(dataclasses.replace(source, device="tpu:9"))


def test_instances_on_several_devices_are_independent(source: ModelSource) -> None:
    if source.device is None:
        with pytest.raises(SettingsError, match=f"--device means nothing to --{source.kind}"):
            open_backends(dataclasses.replace(source, device="cpu,cpu"))
        return
    one, two = open_backends(dataclasses.replace(source, device="cpu,cpu"))
    first, second = rows(3, seed=3), rows(3, seed=4)
    a, b = one.predict({"x": first})["logits"], two.predict({"x": second})["logits"]
    one.close()
    np.testing.assert_allclose(a, expected(first), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(b, expected(second), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two.predict({"x": first})["logits"], expected(first), rtol=1e-5, atol=1e-6)
    two.close()
