"""A row goes to the service of its value, and what is no value goes nowhere."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import numpy as np
import pytest

from edl.distill.source.routes import Router
from edl.errors import SourceError


class Domain(enum.Enum):
    """A type of the user's own."""

    CODE = 1
    LAW = 2


def router(*values: Any) -> Router:
    return Router(lambda batch: batch, {value: at for at, value in enumerate(values)})


@pytest.mark.parametrize(
    "found",
    [map(str, ["code", "law"]), {"code": 1}.values(), deque(["code", "law"]), {"code"}, frozenset({"code"}), object()],
)
def test_containers_are_no_single_value(found: Any) -> None:
    """They would send all rows to the teachers of all other values."""
    with pytest.raises(SourceError, match="expected a list, an array or a tensor"):
        router("code", None).of_batch(found, 2, "batch 3")


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), ["code"], object(), map(str, ["code"])])
def test_what_is_no_value_has_no_route(value: Any) -> None:
    with pytest.raises(SourceError, match="sample 3 has route"):
        router("code", None).of_sample(value, "sample 3")
    with pytest.raises(SourceError, match="batch 3, row 1 has route"):
        router("code", None).of_batch(["code", value], 2, "batch 3")


def test_bytes_are_the_string_that_they_hold() -> None:
    column = np.array(["code", "law", "code"], dtype="S4")
    assert router("code", None).of_batch(column, 3, "batch 0") == [0, 1, 0]
    assert router("code", None).of_batch(b"code", 2, "batch 0") == [0, 0]
    assert router(b"code", "code").of_sample(np.bytes_("code"), "sample 0") == 0


def test_values_of_the_keys_types_are_values() -> None:
    assert router(Domain.CODE, None).of_batch([Domain.CODE, Domain.LAW], 2, "batch 0") == [0, 1]
    assert router("code", None).of_batch([None, 3, True, 0.5], 4, "batch 0") == [1] * 4
