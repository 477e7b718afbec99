"""Answers that are well-formed, and are of another model, another request or another type than was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.distill.dispatch.policy import Policy
from edl.errors import BadOutputError
from edl.protocol import codec, kserve
from tests.fast.distill.versions.test_foreign_versions import Foreign

ROWS = 12


class Odd(Foreign):
    """A KServe v2 server whose answers are changed before they are sent."""

    change: Callable[[kserve.ModelInferResponse, list[bytes]], None]

    def _infer(self, data: bytes, context: Any) -> bytes:
        header, raw = codec.decode_response(super()._infer(data, context))
        header.id = codec.parse_request(codec.split_request(data)[0]).id
        contents = [bytes(view) for view in raw]
        self.change(header, contents)
        return codec.encode_response(header, contents)


def labels_of(change: Callable[[kserve.ModelInferResponse, list[bytes]], None], **arguments: Any) -> list[Any]:
    server = Odd(("1",), lambda asked: ("1", 1.0))
    server.change = change
    server.start()
    options = Options(teacher_timeout_s=30, policy=Policy(aside_s=0.1, open_min_s=0.1))
    try:
        with DistillReader(
            ["x"], ["y"], teachers=server.endpoint, teacher_batch_size=4, options=options, **arguments
        ) as reader:
            reader.set_sample_generator(samples)
            return list(reader())
    finally:
        server.close()


def samples() -> Iterator[Any]:
    for number in range(ROWS):
        yield (np.full(4, number, np.float32),)


def another_model(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.model_name = "dogs"


def another_id(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.id = f"{int(header.id, 16) + 1:016x}"


def output_twice(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.outputs.add().CopyFrom(header.outputs[0])
    raw.append((np.frombuffer(raw[0], "<f4") + 1).tobytes())


def cast_to(datatype: str, dtype: str) -> Callable[[kserve.ModelInferResponse, list[bytes]], None]:
    def change(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
        header.outputs[0].datatype = datatype
        raw[0] = np.frombuffer(raw[0], "<f4").astype(dtype).tobytes()

    return change


def typed(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.outputs[0].datatype = "INT32"
    header.outputs[0].contents.int_contents.extend(np.frombuffer(raw.pop(), "<f4").astype(int).tolist())


def says_little(header: kserve.ModelInferResponse, raw: list[bytes]) -> None:
    header.model_name = header.id = ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_model, "it answers for model 'dogs', and 'm' is asked for"),
        (another_id, "its answer is to request '"),
        (output_twice, "output 'y' is in its answer twice"),
        (cast_to("BOOL", "?"), "output 'y' is 'BOOL', not 'FP32'"),
        (cast_to("INT32", "<i4"), "output 'y' is 'INT32', not 'FP32'"),
        (cast_to("FP64", "<f8"), "output 'y' is 'FP64', not 'FP32'"),
        (cast_to("FP16", "<f2"), "output 'y' is 'FP16', not 'FP32'"),
        (typed, "output 'y' is 'INT32', not 'FP32'"),
    ],
)
def test_an_odd_answer_is_no_label(change: Any, words: str) -> None:
    with pytest.raises(BadOutputError, match=words):
        labels_of(change)


@pytest.mark.parametrize(
    ("change", "dtype"), [(says_little, None), (cast_to("FP16", "<f2"), "float16"), (says_little, "float16")]
)
def test_an_answer_may_say_little(change: Any, dtype: Any) -> None:
    arguments = {"dtype": dtype} if dtype else {}
    rows = labels_of(change, **arguments)
    assert [float(y[0]) for *_, y in rows] == [float(number) for number in range(ROWS)]
    assert rows[0][-1].dtype == np.dtype(dtype or "float32")
