"""Which labels of a cache a student without teachers gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.pipeline.cache_lookup import CacheConfig, offline_view
from edl.distill.teachers import Teachers, service_identities
from edl.distill.transport.schema import OutputSpec
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
        ([KEY], OutputSpec(("y",)), KEY),
        ([HALF], OutputSpec(("y",)), HALF),
        ([KEY, HALF], OutputSpec(("y",)), KEY),
        ([KEY, HALF], OutputSpec(("y",), dtype="float16"), HALF),
        ([HALF, FULL], OutputSpec(("y",)), None),
        ([KEY, replace(KEY, version="2")], OutputSpec(("y",)), None),
        ([KEY, replace(KEY, version="2"), HALF], OutputSpec(("y",)), None),
        ([KEY, replace(KEY, version="2")], OutputSpec(("y",), version="2"), replace(KEY, version="2")),
        ([KEY], OutputSpec(("y",), version="2"), None),
        ([KEY, replace(KEY, service="a")], OutputSpec(("y",)), None),
        ([KEY, HALF], OutputSpec(("y",), dtype="float32"), None),
        (
            [replace(KEY, outputs=("a", "y")), replace(KEY, outputs=("y", "a"))],
            OutputSpec(("y", "a")),
            replace(KEY, outputs=("y", "a")),
        ),
    ],
)
def test_exact_question_goes_first(there: list[CacheKey], ask: OutputSpec, chosen: CacheKey | None) -> None:
    with cache_of(*there) as cache:
        if chosen is not None:
            assert offline_view(CacheConfig(cache), ask).key == chosen
            return
        with pytest.raises(SettingsError, match="sets of labels for"):
            offline_view(CacheConfig(cache), ask)


def test_who_a_groups_labels_are_of() -> None:
    one, other = (Teachers("s", discovery=f"sqlite:///{name}") for name in "ab")
    fixed = Teachers(endpoints=("10.0.0.2:1", "10.0.0.1:1"))
    assert service_identities([one, fixed]) == ["s", "10.0.0.1:1,10.0.0.2:1"]
    assert service_identities([fixed]) == service_identities([replace(fixed, endpoints=fixed.endpoints[::-1])])
    assert len(set(service_identities([one, other]))) == 2, "two services of one name, in two registries"
    assert len(set(service_identities([replace(one, model="a"), replace(one, model="b")]))) == 1
