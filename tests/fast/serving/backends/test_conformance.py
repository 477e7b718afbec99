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
from tests.fast.serving.backends.models import FORMS, IN, OUT, expected

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


def test_specs_are_those_of_the_model(backend: Backend) -> None:
    """Names types and shapes are those of the model."""
    assert backend.inputs == (TensorSpec("x", "FP32", (IN,)),)
    assert backend.outputs == (TensorSpec("logits", "FP32", (OUT,)),)
    assert backend.platform


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 64])
def test_any_number_of_rows(backend: Backend, count: int) -> None:
    """Any number of rows is answered row by row."""
    x = rows(count)
    answer = backend.predict({"x": x})
    logits = answer["logits"]
    assert logits.dtype == np.float32
    assert logits.shape == (count, OUT)
    np.testing.assert_allclose(logits, expected(x), rtol=1e-5, atol=1e-6)


def test_read_only_and_unaligned_inputs(backend: Backend) -> None:
    """Read only and unaligned inputs are taken and left alone."""
    x = rows(6)
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    np.testing.assert_allclose(backend.predict({"x": frozen})["logits"], expected(x), rtol=1e-5, atol=1e-6)
    odd = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not odd.flags.aligned
    np.testing.assert_allclose(backend.predict({"x": odd})["logits"], expected(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(frozen, x)


def test_answer_outlives_its_inputs(backend: Backend) -> None:
    """An answer stays what it is when its inputs are written again."""
    x = rows(5)
    logits = backend.predict({"x": x})["logits"]
    wanted = expected(x)
    x[:] = np.nan
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)


def test_version_follows_weights(form: str, source: ModelSource, backend: Backend, tmp_path: Path) -> None:
    """The same model has the same version and other weights another."""
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


def test_meaningless_settings_are_refused(source: ModelSource) -> None:
    """Settings that mean nothing to a backend are refused."""
    unknown = {"checkpoint": "w.pt"} if source.kind != "torch-factory" else {}
    unknown |= {"normalize": "imagenet"} if source.kind in ("callable", "factory", "paddle") else {}
    for field, value in unknown.items():
        with pytest.raises(SettingsError, match=rf"--{field} means nothing to --{source.kind}"):
            open_backends(dataclasses.replace(source, **{field: value}))
    if source.device is not None:
        with pytest.raises(SettingsError, match="--device 'tpu:9'"):
            open_backends(dataclasses.replace(source, device="tpu:9"))


def test_device_instances_are_independent(source: ModelSource) -> None:
    """Instances on several devices are independent."""
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
