"""Labels from language models: tokens/s, and bytes and CPU time per token, compared with vLLM's HTTP API and padding.

All sides use the same tiny random Llama on one thread, and request the 64 likeliest tokens at each position of
sequences of 16 to 510 tokens. `vs_vllm_http` compares EDL with a client that calls vLLM over HTTP, as TRL does;
`vs_padded` compares it with padded batches. `client_cpu_vs_json` is the CPU time per token of a student that uses a
gateway, divided by that for parsing vLLM's JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._child import ROOT, Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._token_student import TOP_K
from edl.testing import LocalTeacher
from tests.plugins_vllm import MODEL, VllmServer

GOALS = [
    Goal("vs_vllm_http", 3.0),
    Goal("vs_padded", 1.5),
    Goal("bytes_per_token", 400.0, "at most"),
    Goal("client_cpu_vs_json", 0.2, "at most"),
]
_WAYS = {
    "rows": "reader, `edl serve --hf`",
    "padded": "reader, `edl serve --hf`, padded to the longest sequence",
    "gateway": "reader, `edl register vllm://`",
    "http": "vLLM's JSON over HTTP",
}
_SLOW = ("gateway", "http")
"""Ways through vLLM. It labels a few thousand tokens per second, so these get longer windows."""
_START_S = 300.0


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    if not (MODEL / "model.safetensors").exists():
        raise SystemExit("tokens: the real vLLM is not installed; run tools/vllm.sh")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        vllm = stack.enter_context(VllmServer(folder / "vllm", "--max-logprobs", str(TOP_K), "--enable-scale-out"))
        serve = {"hf": MODEL, "task": "causal-lm", "top-k": TOP_K, "threads": 1, "shared-memory": False}
        teacher = stack.enter_context(LocalTeacher("", serve=serve, timeout_s=_START_S))
        http = f"127.0.0.1:{vllm.port}"
        gateway = stack.enter_context(_gateway(http, folder))
        endpoints = dict.fromkeys(_WAYS, teacher.endpoint) | {"gateway": gateway, "http": http}
        students = {way: stack.enter_context(_student(way, endpoint)) for way, endpoint in endpoints.items()}
        _check_agreement(students)

        def ask(way: str) -> Callable[[], dict[str, Any]]:
            seconds = 2 * options.seconds if way in _SLOW else options.seconds
            return lambda: students[way].ask(seconds=seconds)

        rounds = take_turns({way: ask(way) for way in _WAYS}, options.repeats)
        bytes_token = {dtype: _count_bytes(teacher.endpoint, dtype) for dtype in (None, "float16")}
    found = {way: {key: [one[key] for one in figures] for key in figures[0]} for way, figures in rounds.items()}
    note("| client | tokens/s | student's CPU, µs/token |")
    note("| --- | ---: | ---: |")
    for way, name in _WAYS.items():
        note(f"| {name} | {Spread.of(found[way]['tokens_s'])} | {Spread.of(found[way]['cpu_us_token'])} |")
    json_bytes = Spread.of(found["http"]["bytes_token"])
    note(f"\nBytes per token, both ways: {bytes_token['float16']:.1f} in float16, {bytes_token[None]:.1f} in")
    note(f"float32, {json_bytes} as JSON over HTTP.")
    return {
        "vs_vllm_http": divide(found["rows"]["tokens_s"], found["http"]["tokens_s"]),
        "vs_padded": divide(found["rows"]["tokens_s"], found["padded"]["tokens_s"]),
        "bytes_per_token": [bytes_token["float16"]],
        "client_cpu_vs_json": divide(found["gateway"]["cpu_us_token"], found["http"]["cpu_us_token"]),
    }


def _student(way: str, endpoint: str) -> Child:
    return Child([sys.executable, "-m", "benchmarks._token_student", way, endpoint])


def _count_bytes(endpoint: str, dtype: str | None) -> float:
    """Return the bytes per token, counted in a process without other connections."""
    with _student("rows", endpoint) as student:
        return float(student.ask(dtype=dtype)["bytes_token"])


def _check_agreement(students: dict[str, Child]) -> None:
    """Check that all ways return the same labels for the first sequence: otherwise they did different work.

    Raises:
        RuntimeError: The labels differ.
    """
    first = {way: student.ask()["first"] for way, student in students.items()}
    expected = first["rows"]
    for way, ids in first.items():
        # Nearly equal values may change places. HTTP does not predict the token after the sequence.
        same = sum(found == wanted for found, wanted in zip(ids, expected, strict=False))
        if same < 0.98 * (len(expected) - 1):
            raise RuntimeError(f"tokens: {way} has {same} of {len(expected)} labels in common with the others")


@contextlib.contextmanager
def _gateway(engine: str, folder: Path) -> Iterator[str]:
    """Start `edl register vllm://`, and yield its endpoint."""
    ready = folder / "ready"
    command = [sys.executable, "-m", "edl", "register", f"vllm://{engine}", "--model", "m", "--engine-model", "tiny"]
    command += ["--model-version", "r1", "--top-k", str(TOP_K), "--discovery", f"sqlite:///{folder}/discovery.sqlite"]
    command += ["--no-shared-memory", "--ready-file", str(ready), "--exit-with", str(os.getpid())]
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() >= deadline:
                raise RuntimeError(f"tokens: the gateway does not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield str(json.loads(ready.read_text())["endpoint"])
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    main("tokens", measure, GOALS, __doc__)
