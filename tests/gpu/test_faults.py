"""Faults of a script on the GPU end a job with the exit code and the words that docs/gpu.md promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ASSERT = "torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].item()"
OUT_OF_MEMORY = "torch.empty(1 << 50, dtype=torch.uint8, device='cuda')"
ILLEGAL = """
import triton
import triton.language as tl

@triton.jit
def write_far(pointer):
    tl.store(pointer + (1 << 40), 1)

write_far[(1,)](torch.zeros(4, dtype=torch.int32, device='cuda'))
torch.cuda.synchronize()
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(f"import torch\n{code}\n")
    command = [sys.executable, "-m", "edl", "run", "--rdzv-id", "fault", "--store", f"sqlite:///{folder}/store.sqlite"]
    return subprocess.run([*command, *options, str(script)], capture_output=True, text=True, timeout=150, cwd=folder)


@pytest.mark.parametrize(
    ("code", "words"), [(ASSERT, "device-side assert triggered"), (OUT_OF_MEMORY, "out of memory")]
)
def test_errors_of_the_script_end_the_job(gpu: torch.device, tmp_path: Path, code: str, words: str) -> None:
    ended = run(tmp_path, code)
    assert (ended.returncode, words in ended.stderr) == (1, True), ended.stderr


def test_an_illegal_address_is_tried_twice(gpu: torch.device, tmp_path: Path) -> None:
    """Unclear whose fault it is: the job begins anew once, then goes on without the node, which ends with 69."""
    pytest.importorskip("triton", reason="Triton, the compiler, is not installed")
    ended = run(tmp_path, ILLEGAL)
    assert ended.returncode == 69, ended.stderr
    assert "an illegal memory access" in ended.stderr
    again = run(tmp_path, ILLEGAL)
    assert again.returncode == 69, "the host is left out of the job"
    assert "--readmit" in again.stderr


def test_no_gpu_is_the_scripts_error(tmp_path: Path) -> None:
    """Where there never was a GPU, a script that wants one has an error of its own."""
    environment_has_none = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\ntorch.zeros(1, device='cuda')"
    ended = run(tmp_path, environment_has_none)
    assert ended.returncode == 1, ended.stderr
    assert "script.py" in ended.stderr


def test_node_check(device: torch.device, tmp_path: Path) -> None:
    """The check of a node multiplies on its GPU, adds up over NCCL with one rank, and lets the node join."""
    ended = run(tmp_path, "print('trained')", "--node-check")
    assert ended.returncode == 0, ended.stderr
    assert "trained" in ended.stdout + ended.stderr
