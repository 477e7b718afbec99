"""The forms of `models.py`, each made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edl_serving.backends import ModelSource
from tests.fast.serving.backends.models import FORMS

Saved = Callable[..., ModelSource]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """How to serve a form, by its name and the seed of its weights."""
    folder, made = tmp_path_factory.mktemp("forms"), dict[tuple[str, int], ModelSource]()

    def find(form: str, seed: int = 0) -> ModelSource:
        if "paddle" in form:
            pytest.importorskip("paddle", reason="PaddlePaddle is not installed: pip install paddlepaddle")
        if (form, seed) not in made:
            made[form, seed] = FORMS[form](folder, seed)
        return made[form, seed]

    return find
