"""What a reader is told: values of a wrong type or size are named, with what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.losses import DistillLoss
from edl.distill.torch import distill
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError

BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Options, {"teacher_timeout_s": "5"}, r"teacher_timeout_s='5': must be a number of seconds above 0"),
    (Options, {"teacher_timeout_s": float("nan")}, r"teacher_timeout_s=nan: must"),
    (Options, {"progress_s": "30"}, r"progress_s='30': must be a number of seconds above 0"),
    (Options, {"memory_bytes": "1GB"}, r"memory_bytes='1GB': must be a whole number of bytes, at least one MiB"),
    (Options, {"memory_bytes": 1e9}, r"memory_bytes=1000000000\.0: must be a whole number"),
    (Options, {"policy": "fast"}, r"policy='fast': expected an edl\.distill\.Policy"),
    (OutputSpec, {"outputs": ("y",), "temperature": "4"}, r"temperature='4': must be a finite number above 0"),
    (OutputSpec, {"outputs": ("y",), "temperature": float("inf")}, r"temperature=inf: must"),
    (OutputSpec, {"outputs": ("y",), "top_k": 0}, r"top_k=0: must be a whole number of at least 1"),
    (Teachers, {"service": "s", "max_teachers": 0}, r"max_teachers=0: must be a whole number of at least 1"),
    (Teachers, {"service": "s", "max_teachers": True}, r"max_teachers=True: must be a whole number of at least 1"),
    (Teachers, {"service": "s", "weight": "1"}, r"weight='1': must be a finite number above 0"),
    (DistillReader, {"ins": 3, "predicts": ["y"]}, r"ins=3: name at least one input"),
    (DistillReader, {"ins": ["x"], "predicts": 3}, r"predicts=3: expected a list of output names"),
    (DistillReader, {"ins": ["x"], "predicts": ["y"], "teachers": 3}, r"teachers=3: expected a service's name"),
    (DistillReader, {"ins": ["x"], "predicts": ["y"], "teachers": ["h:1", 3]}, r"teachers=\['h:1', 3\]: expected"),
    (DistillReader, {"ins": ["x"], "predicts": ["y"], "teacher_batch_size": 2.0}, r"teacher_batch_size=2\.0: must be"),
    (distill, {"loader": [], "teachers": "s", "inputs": "x", "outputs": 3}, r"outputs=3: expected the name"),
    (
        distill,
        {"loader": [], "teachers": "s", "inputs": "x", "outputs": "y", "batch_rows": "8"},
        r"batch_rows='8'",
    ),
    (DistillLoss, {"alpha": "0.5"}, r"alpha='0\.5': the share of the soft loss must be from 0 to 1"),
    (DistillLoss, {"alpha": np.array([0.1, 0.2])}, r"alpha=array\(\[0\.1, 0\.2\]\): the share"),
    (DistillLoss, {"temperature": np.array([1.0, 2.0])}, r"temperature=array\(\[1\., 2\.\]\): must be a finite"),
]


@pytest.mark.parametrize(("kind", "values", "words"), BAD)
def test_unusable_values_are_named(kind: Callable[..., Any], values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        kind(**values)


def test_a_reader_may_wait_for_ever() -> None:
    assert Options(teacher_timeout_s=float("inf"), progress_s=float("inf")).memory_bytes == 512 << 20
