"""The `tokens` benchmark's students, which take labels of sequences as fast as they arrive. Runs as a `Child`.

All ways use the same sequences: the reader with rows, the reader with batches padded to their longest sequence, and
HTTP requests with several prompts each, four at a time, like TRL 1.16's client for vLLM.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks._child import WARM_UP_S, answer
from edl.distill import DistillReader, Options

__all__ = ["LONGEST", "TOP_K", "VOCABULARY"]

TOP_K = 64
VOCABULARY = 2000
SHORTEST, LONGEST = 16, 510
"""vLLM's model takes 512 tokens, of which a gateway needs two."""
_SEQUENCES = 64
_BATCH = 16
"""Sequences in a padded batch, and in a call over HTTP."""
_PROMPTS = 4
"""Prompts in a request over HTTP. The requests of a batch are sent concurrently."""
_AHEAD_NBYTES = 4 << 20
"""Bytes of labels that are ready when a side's turn begins: few compared with a window's labels."""
_GATEWAY_TOKENS = 512
"""Tokens per request. vLLM takes seconds for the reader's usual 2,048 tokens, and a window needs several answers."""
_TCP_INFO_BYTES = struct.Struct("120x2Q")
"""tcp_info's tcpi_bytes_acked and tcpi_bytes_received; see linux/tcp.h."""

Array = np.ndarray[Any, np.dtype[Any]]


class Batch(NamedTuple):
    """A labelled batch.

    Attributes:
        tokens: Number of tokens.
        likeliest: The most likely token of each row of the first sequence.
        nbytes: Bytes of the request and the answer, if they are known here.
    """

    tokens: int
    likeliest: Array
    nbytes: int = 0


def sequences() -> list[Array]:
    """Return the sequences, int32, with uniformly distributed lengths."""
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST, _SEQUENCES, endpoint=True)
    return [random.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]


def ask_rows(endpoint: str, stack: ExitStack, batch_size: int | None = None) -> Iterator[Batch]:
    """Yield labelled batches of sequences sent as rows, without end."""
    reader = _reader(endpoint, stack, batch_size=batch_size)
    reader.set_sequence_generator(lambda: ((ids,) for ids in itertools.cycle(sequences())))
    for ids, labels in reader():
        assert labels.ids.shape == (len(ids), TOP_K)
        yield Batch(len(ids), labels.ids[:, 0])


def ask_padded(endpoint: str, stack: ExitStack) -> Iterator[Batch]:
    """Yield labelled batches padded to their longest sequence. The teacher also computes and returns the padding."""
    batches = [sequences()[begin : begin + _BATCH] for begin in range(0, _SEQUENCES, _BATCH)]
    padded = []
    for batch in batches:
        longest = max(map(len, batch))
        padded += [(np.pad(ids, (0, longest - len(ids))), len(ids)) for ids in batch]
    reader = _reader(endpoint, stack)
    reader.set_sequence_generator(lambda: itertools.cycle(padded))
    for ids, count, labels in reader():
        assert labels.ids.shape == (len(ids), TOP_K)
        yield Batch(count, labels.ids[:count, 0])


def _reader(
    endpoint: str,
    stack: ExitStack,
    dtype: Literal["float16"] | None = None,
    batch_size: int | None = None,
) -> DistillReader:
    reader = DistillReader(
        ins=["ids"],
        predicts=["logprobs"],
        teachers=endpoint,
        teacher_batch_size=batch_size,
        top_k=TOP_K,
        dtype=dtype,
        options=Options(shared_memory=False, memory_bytes=_AHEAD_NBYTES),
    )
    return stack.enter_context(closing(reader))


def ask_http(endpoint: str, stack: ExitStack) -> Iterator[Batch]:
    """Yield batches labelled over HTTP. The JSON answers are parsed to arrays of ids and log-probabilities."""
    threads = stack.enter_context(ThreadPoolExecutor(_BATCH // _PROMPTS))
    every = sequences()
    for begin in itertools.cycle(range(0, _SEQUENCES, _BATCH)):
        chunks = [every[start : start + _PROMPTS] for start in range(begin, begin + _BATCH, _PROMPTS)]
        answers = list(threads.map(partial(_post, endpoint), chunks))
        tokens = sum(len(ids) for chunk in chunks for ids in chunk)
        (likeliest, *_), _ = answers[0]
        yield Batch(tokens, likeliest[0][:, 0], sum(nbytes for _, nbytes in answers))


def _post(endpoint: str, prompts: Sequence[Array]) -> tuple[list[tuple[Array, Array]], int]:
    """Return the ids and log-probabilities of each prompt, and the bytes of the request and the answer."""
    question = {
        "model": "tiny",
        "prompt": [ids.tolist() for ids in prompts],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": TOP_K,
    }
    body = json.dumps(question).encode()
    # vLLM closes connections that were idle for five seconds, as this one would be during other sides' turns.
    with closing(http.client.HTTPConnection(endpoint, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    if response.status != http.client.OK:
        raise RuntimeError(f"vLLM answered {response.status}: {content[:300]!r}")
    arrays = [_arrays_of(choice["prompt_logprobs"]) for choice in json.loads(content)["choices"]]
    return arrays, len(body) + len(content)


def _arrays_of(positions: Sequence[dict[str, dict[str, Any]] | None]) -> tuple[Array, Array]:
    """Return the ids and log-probabilities [tokens - 1, k] of a prompt, the most likely first."""
    ids, values = [], []
    for found in positions[1:]:
        assert found is not None
        ranked = sorted(found.items(), key=lambda entry: entry[1]["rank"])[:TOP_K]
        ids.append([int(token) for token, _ in ranked])
        values.append([entry["logprob"] for _, entry in ranked])
    return np.array(ids, np.int32), np.array(values, np.float32)


def network_bytes() -> int:
    """Return the payload bytes that this process's TCP connections have carried, both ways."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            copy = os.dup(int(path.name))
        except OSError:
            continue  # the folder's own descriptor
        try:
            with socket.socket(fileno=copy) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            total += sum(_TCP_INFO_BYTES.unpack_from(info))
        except OSError:
            if not _is_closed(copy):
                os.close(copy)  # not a socket, or not a TCP socket
    return total


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def measure(batches: Iterator[Batch], seconds: float) -> dict[str, float]:
    """Take labels for `seconds`, and return the counts of labels and of the resources that this process used."""
    begin = time.perf_counter() + WARM_UP_S
    for _ in batches:
        if time.perf_counter() >= begin:
            break
    tokens = nbytes = 0
    opened, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        tokens += batch.tokens
        nbytes += batch.nbytes
        if time.perf_counter() >= opened + seconds:
            break
    took = time.perf_counter() - opened
    return {
        "tokens_s": tokens / took,
        "cpu_us_token": (time.process_time() - cpu) / tokens * 1e6,
        "bytes_token": nbytes / tokens,
    }


def count_bytes(endpoint: str, dtype: Literal["float16"] | None) -> float:
    """Return the bytes per token in an epoch over the sequences, including everything else that a reader sends."""
    with ExitStack() as stack:
        reader = _reader(endpoint, stack, dtype)
        reader.set_sequence_generator(lambda: ((ids,) for ids in sequences()))
        before = network_bytes()
        tokens = sum(len(ids) for ids, _ in reader())
        return (network_bytes() - before) / tokens


def main() -> None:
    """Answer requests: `{"seconds": …}` measures, `{"dtype": …}` counts bytes, `{}` returns the first labels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("rows", "padded", "gateway", "http"))
    parser.add_argument("endpoint", help="HOST:PORT")
    given = parser.parse_args()
    with ExitStack() as stack:
        ways: dict[str, Callable[[], Iterator[Batch]]] = {
            "rows": lambda: ask_rows(given.endpoint, stack),
            "padded": lambda: ask_padded(given.endpoint, stack),
            "gateway": lambda: ask_rows(given.endpoint, stack, batch_size=_GATEWAY_TOKENS),
            "http": lambda: ask_http(given.endpoint, stack),
        }
        batches = ways[given.way]()

        def handle(request: dict[str, Any]) -> dict[str, Any]:
            if "seconds" in request:
                return measure(batches, request["seconds"])
            if "dtype" in request:
                return {"bytes_token": count_bytes(given.endpoint, request["dtype"])}
            return {"first": next(batches).likeliest.tolist()}

        answer(handle)


if __name__ == "__main__":
    main()
