"""PaddlePaddle inference models: what their files say, and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.errors import SettingsError
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import TensorSpec
from tests.fast.serving.backends.conftest import Saved
from tests.fast.serving.backends.models import expected
from tests.waiting import DEADLINE_S

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


def test_the_order_of_outputs_is_a_version(tmp_path: Path) -> None:
    """Names that are not the model's are given by place, so in another order they are other labels."""
    import paddle

    class Pair(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.create_parameter([1], default_initializer=paddle.nn.initializer.Constant(1.0))

        def forward(self, x: Any) -> Any:
            return x * self.scale, x * self.scale * 2.0

    path = str(tmp_path / "pair")
    paddle.jit.save(Pair(), path, input_spec=[paddle.static.InputSpec([None, 4], "float32", name="x")])
    found = {}
    for outputs in (("one", "double"), ("double", "one"), ("one", "double")):
        (backend,) = open_backends(ModelSource("paddle", path, device="cpu", outputs=outputs))
        doubled = bool(np.allclose(backend.predict({"x": X})["double"], X * 2))
        assert found.setdefault(doubled, backend.version) == backend.version, "the same labels have the same version"
    assert len(set(found.values())) == len(found) == 2


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


def test_old_programs_are_read_while_alive(saved: Saved) -> None:
    """In a process of its own, which may crash, and where glibc fills memory that is freed with garbage."""
    script = (
        "import sys, pathlib\n"
        "from edl_serving.backends.paddle import _shapes_of\n"
        "program = pathlib.Path(sys.argv[1])\n"
        "found = {str(_shapes_of(program, ['x'])) for _ in range(50)}\n"
        "print(len(found), *found)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, saved("old_paddle").target + ".pdmodel"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "MALLOC_PERTURB_": "165"},
    )
    assert run.returncode == 0, f"{run.returncode}: {run.stderr[-500:]}"
    assert run.stdout.split()[0] == "1", run.stdout
    assert "[-1, " in run.stdout
