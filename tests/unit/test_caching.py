"""Which labels of a cache a student without teachers gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.caching import Caching, offline_view
from edl.distill.request import Ask
from edl.errors import SettingsError

KEY = CacheKey("m", "1", ("y",))
HALF = replace(KEY, dtype="float16")
FULL = replace(KEY, dtype="float32")


def cache_of(*keys: CacheKey) -> SoftLabelCache:
    cache = SoftLabelCache()
    for key in keys:
        cache.view(key).put([1], {name: np.zeros((1, 3), key.dtype or "float32") for name in key.outputs})
    return cache


@pytest.mark.parametrize(
    ("there", "ask", "chosen"),
    [
        ([KEY], Ask(("y",)), KEY),
        ([HALF], Ask(("y",)), HALF),
        ([KEY, HALF], Ask(("y",)), KEY),
        ([KEY, HALF], Ask(("y",), dtype="float16"), HALF),
        ([HALF, FULL], Ask(("y",)), None),
        ([KEY, replace(KEY, version="2")], Ask(("y",)), None),
        ([KEY, replace(KEY, version="2"), HALF], Ask(("y",)), None),
        ([KEY, HALF], Ask(("y",), dtype="float32"), None),
        (
            [replace(KEY, outputs=("a", "y")), replace(KEY, outputs=("y", "a"))],
            Ask(("y", "a")),
            replace(KEY, outputs=("y", "a")),
        ),
    ],
)
def test_what_is_asked_in_the_same_words_goes_first(there: list[CacheKey], ask: Ask, chosen: CacheKey | None) -> None:
    with cache_of(*there) as cache:
        if chosen is not None:
            assert offline_view(Caching(cache), ask).key == chosen
            return
        with pytest.raises(SettingsError, match="sets of labels for"):
            offline_view(Caching(cache), ask)
