"""PaddlePaddle inference models: what their files say, and what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edl.errors import SettingsError
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import TensorSpec
from tests.fast.serving.backends.conftest import Saved
from tests.fast.serving.backends.models import expected

pytest.importorskip("paddle", reason="PaddlePaddle is not installed: pip install paddlepaddle")

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture
def source(saved: Saved) -> ModelSource:
    return replace(saved("paddle"), outputs=())


def test_outputs_keep_the_files_names(source: ModelSource) -> None:
    """Unless they are given others; and any of its files names a model."""
    (plain,) = open_backends(source)
    (output,) = plain.outputs
    assert output == TensorSpec(output.name, "FP32", (3,))
    np.testing.assert_allclose(plain.predict({"x": X})[output.name], expected(X), rtol=1e-5, atol=1e-6)
    for suffix in (".json", ".pdiparams"):
        target = source.target + suffix
        (named,) = open_backends(replace(source, target=target, outputs=("logits:float16[3]",), threads=1))
        logits = named.predict({"x": X})["logits"]
        assert logits.dtype == np.float16
        np.testing.assert_allclose(logits, expected(X), atol=0.02)


def test_misfits_are_named(source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the model's inputs are x; got image"):
        open_backends(replace(source, inputs=("image:float32[4]",)))
    with pytest.raises(SettingsError, match=r"the model answers .*; wanted are 'a', 'b'"):
        open_backends(replace(source, outputs=("a", "b")))
    (tmp_path / "half.json").write_bytes(Path(source.target + ".json").read_bytes())
    with pytest.raises(SettingsError, match=r"there is .*half\.json, but no .*half\.pdiparams"):
        open_backends(replace(source, target=str(tmp_path / "half")))
    with pytest.raises(SettingsError, match="--device 'cuda:7': PaddlePaddle sees 0 GPUs here"):
        open_backends(replace(source, device="cuda:7"))
