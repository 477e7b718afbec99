"""A model that takes its inputs as BF16, a type that numpy does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edl.distill import Options
from edl.distill.torch import distill
from tests.fast.distill.conftest import Start

MODEL = """
from edl.testing.models import Model

def half_precise(**options):
    return Model(lambda inputs: {"y": inputs["x"] * 2}, ["x:bf16[3]"], ["y:float32[3]"], **options)
"""


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inputs_are_rounded_to_bfloat16(
    start: Start, tmp_path: Path, dtype: torch.dtype, *, shared_memory: bool
) -> None:
    (tmp_path / "models.py").write_text(MODEL)
    teacher = start(f"{tmp_path}/models.py:half_precise")
    batches = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in (5, 1, 8)]
    options = Options(teacher_timeout_s=60, shared_memory=shared_memory)
    with distill(batches, teacher.endpoint, inputs="x", outputs="y", batch_rows=4, options=options) as labelled:
        for batch, labels in labelled:
            assert torch.equal(labels, batch.float().bfloat16().float() * 2)
