"""A model that forks: its children end where they leave its code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys, traceback
from tests.fast.serving.fakes import FakeBackend, five_logits, model_of, request_for
from edl_serving import ServerSettings
from edl_serving.batching.executor import Executor
from edl_serving.batching.job import InferenceJob
from edl_serving.monitoring.metrics import WorkerMetrics
import numpy as np

server = os.getpid()

def predict(inputs):
    child = os.fork()
    if child == 0:
        LEAVE
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return five_logits(inputs)

backend = FakeBackend(predict)
model = model_of(backend)
x = np.ones((2, 4), np.float32)
job = InferenceJob(request_for(model, x), 2, ((4,),), 0.0, float("inf"))
Executor(backend, model, ServerSettings(model="m"), WorkerMetrics()).run_jobs([job])
if os.getpid() != server:
    os._exit(99)
print("answer", type(job.answer).__name__)
"""


@pytest.mark.parametrize(
    ("leave", "code"), [("raise SystemExit(3)", 3), ("raise ValueError('in the child')", 1), ("return {}", 1)]
)
def test_a_forked_child_never_leaves_a_model(leave: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE.replace("LEAVE", leave)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert ended.stdout.splitlines() == [f"child {code}", "answer bytes"], ended.stderr
    assert ("in the child" in ended.stderr) == ("ValueError" in leave)
