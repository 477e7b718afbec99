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
from tests.fast.serving.backends.conftest import Saved
from tests.fast.serving.backends.models import FORMS, IN, OTHER_SEED, OUT, expected


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def source(saved: Saved, form: str) -> ModelSource:
    return saved(form)


@pytest.fixture(scope="module")
def backend(source: ModelSource) -> Iterator[Backend]:
    (opened,) = open_backends(source)
    opened.warm_up(8)
    yield opened
    opened.close()


def rows(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, IN)).astype(np.float32)


def check(backend: Backend, x: np.ndarray, seed: int = 0) -> None:
    """Answers are right to rounding."""
    logits = backend.predict({"x": x})["logits"]
    assert (logits.dtype, logits.shape) == (np.float32, (len(x), OUT))
    np.testing.assert_allclose(logits, expected(x, seed), rtol=1e-5, atol=1e-6)


def test_any_number_of_rows(backend: Backend) -> None:
    assert backend.inputs == (TensorSpec("x", "FP32", (IN,)),)
    assert backend.outputs == (TensorSpec("logits", "FP32", (OUT,)),)
    assert backend.platform
    for count in (1, 2, 3, 4, 5, 8, 64):
        check(backend, rows(count))


def test_inputs_are_others_memory(backend: Backend) -> None:
    """Read-only and unaligned inputs are taken and left alone; an answer outlives them."""
    x = rows(6)
    frozen = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    check(backend, frozen)
    odd = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not odd.flags.aligned
    check(backend, odd)
    np.testing.assert_array_equal(frozen, x)
    logits, wanted = backend.predict({"x": x})["logits"], expected(x)
    x[:] = np.nan
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)


def test_version_follows_weights(form: str, source: ModelSource, backend: Backend, saved: Saved) -> None:
    (again,) = open_backends(source)
    (other,) = open_backends(saved(form, OTHER_SEED))
    (named,) = open_backends(dataclasses.replace(source, version="mine"))
    assert again.version == backend.version
    assert other.version != backend.version
    assert named.version == "mine"
    check(other, rows(3), OTHER_SEED)
    for opened in (again, other, named):
        opened.close()


def test_what_cannot_be_is_named(source: ModelSource, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing_here")
    target = f"{missing}.py:f" if ":" in source.target else missing
    with pytest.raises(SettingsError, match="nothing_here"):
        open_backends(dataclasses.replace(source, target=target))
    unknown = {"checkpoint": "w.pt"} if source.kind != "torch-factory" else {}
    unknown |= {"normalize": "imagenet"} if source.kind in ("callable", "factory", "paddle") else {}
    unknown |= {"device": "cpu,cpu"} if source.device is None else {}
    for field, value in unknown.items():
        with pytest.raises(SettingsError, match=rf"--{field} does not apply to --{source.kind}"):
            open_backends(dataclasses.replace(source, **{field: value}))
    if source.device is not None:
        with pytest.raises(SettingsError, match="--device 'tpu:9'"):
            open_backends(dataclasses.replace(source, device="tpu:9"))


def test_paddle_outputs_keep_their_names(saved: Saved) -> None:
    """Unless they are given others; and any of its files names a model."""
    source, x = dataclasses.replace(saved("paddle"), outputs=()), rows(5)
    (plain,) = open_backends(source)
    (output,) = plain.outputs
    assert output == TensorSpec(output.name, "FP32", (3,))
    np.testing.assert_allclose(plain.predict({"x": x})[output.name], expected(x), rtol=1e-5, atol=1e-6)
    for suffix in (".json", ".pdiparams"):
        target = source.target + suffix
        (named,) = open_backends(dataclasses.replace(source, target=target, outputs=("logits:float16[3]",), threads=1))
        logits = named.predict({"x": x})["logits"]
        assert logits.dtype == np.float16
        np.testing.assert_allclose(logits, expected(x), atol=0.02)


def test_paddle_misfits_are_named(saved: Saved, tmp_path: Path) -> None:
    source = dataclasses.replace(saved("paddle"), outputs=())
    with pytest.raises(SettingsError, match="the model's inputs are x; got image"):
        open_backends(dataclasses.replace(source, inputs=("image:float32[4]",)))
    with pytest.raises(SettingsError, match=r"the model returns .*; expected 'a', 'b'"):
        open_backends(dataclasses.replace(source, outputs=("a", "b")))
    (tmp_path / "half.json").write_bytes(Path(source.target + ".json").read_bytes())
    with pytest.raises(SettingsError, match=r"there is .*half\.json, but no .*half\.pdiparams"):
        open_backends(dataclasses.replace(source, target=str(tmp_path / "half")))
    with pytest.raises(SettingsError, match="--device 'cuda:7': PaddlePaddle sees 0 GPUs here"):
        open_backends(dataclasses.replace(source, device="cuda:7"))
