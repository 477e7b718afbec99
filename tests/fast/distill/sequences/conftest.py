"""Language models in this process, which a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fast.distill.conftest import Served
from tests.fast.distill.sequences.language_model import NegativeModel, PrefixModel


@pytest.fixture(scope="module")
def model() -> Iterator[Served]:
    served = Served(PrefixModel(max_sequence=200), {"max_batch_rows": 512})
    yield served
    served.close()


@pytest.fixture(scope="module")
def negative() -> Iterator[Served]:
    served = Served(NegativeModel(), {"max_batch_rows": 512})
    yield served
    served.close()
