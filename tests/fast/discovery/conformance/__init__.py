"""The conformance suite of registries and stores: one body, two tiers.

`suite` has the tests, `backends` the implementations and means to harm them, `processes` other processes that take
part, and `fixtures` what each tier's `conftest` imports. SQLite and `edl://` run in `tests/fast/discovery`, Consul and
etcd in `tests/services/discovery`. Nothing here is collected by itself.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.suite", f"{__name__}.backends", f"{__name__}.fixtures")
