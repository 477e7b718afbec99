"""The soft-label cache as a reader uses it: rows by key and id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from edl.distill.cache import CacheView, SoftLabelCache
from edl.errors import ClosedError, SettingsError
from tests.fast.distill.cache.conftest import KEY, found
from tests.waiting import DEADLINE_S

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SoftLabelCache]:
    made = SoftLabelCache(
        memory_bytes=0 if request.param == "disk" else 64 << 20,
        path=None if request.param == "memory" else tmp_path / "labels",
    )
    yield made
    made.close()


def logits(rows: int, classes: int = 10, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, classes)).astype(np.float32)


def test_missing_rows_are_filled_in(cache: SoftLabelCache) -> None:
    labels, view = logits(10), cache.view(KEY)
    nothing = view.get([1, 2])
    assert nothing.mask.tolist() == [False, False]
    assert not nothing.outputs
    np.testing.assert_array_equal(nothing.filled({"logits": labels[:2]})["logits"], labels[:2])  # type: ignore[arg-type]
    view.put([0, 2, 4], {"logits": labels[[0, 2, 4]]})
    found = view.get([0, 1, 2, 3, 4])
    assert found.mask.tolist() == [True, False, True, False, True]
    assert not found.complete
    np.testing.assert_array_equal(found.outputs["logits"], labels[[0, 2, 4]])  # type: ignore[arg-type]
    whole = found.filled({"logits": labels[[1, 3]]})
    np.testing.assert_array_equal(whole["logits"], labels[:5])  # type: ignore[arg-type]
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (3, 4)
    with pytest.raises(SettingsError, match="the other rows"):
        found.filled({"logits": logits(2, 11)})
    with pytest.raises(SettingsError, match="2 rows"):
        found.filled({"logits": labels[:3]})
    # What does not fit is refused.
    with pytest.raises(SettingsError, match=r"\[11\].*float32 \[10\].*new `dataset` tag"):
        view.put([6], {"logits": logits(1, 11)})
    with pytest.raises(SettingsError, match="float64"):
        view.put([6], {"logits": logits(1).astype(np.float64)})
    with pytest.raises(SettingsError, match=r"outputs \['features'\]: expected those in the cache's key, \['logits'\]"):
        view.put([6], {"features": logits(1)})
    with pytest.raises(SettingsError, match="expected 2 rows, one for each id"):
        view.put([6, 7], {"logits": logits(3)})
    assert view.ids() == [0, 2, 4]


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0],
        [True, 0],
        [np.float32(1), 2],
        [b"a", b"b"],
        np.zeros((2, 2), int),
    ],
    ids=repr,
)
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    """Those that are equal to others as keys of a dict included."""
    with SoftLabelCache() as cache:
        view = cache.view(KEY)
        for ask in (view.get, view.contains, lambda ids: view.put(ids, {"logits": logits(2)})):
            with pytest.raises(SettingsError, match="sample id"):
                ask(ids)
        for none in ([2**63, 0], ["\ud800", "b"]):
            with pytest.raises(SettingsError, match="sample id"):
                view.put(none, {"logits": logits(2)})  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="3: expected a sequence"):
            view.get(np.int64(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"memory_bytes": -1}, "memory_bytes=-1"),
        ({"memory_bytes": None}, "memory_bytes=None"),
        ({"disk_bytes": 1 << 20}, "together with a path"),
        ({"path": "x", "disk_bytes": 100}, "disk_bytes=100: must be at least 1048576"),
        ({"path": "x", "disk_bytes": "1GB"}, "disk_bytes='1GB'"),
        ({"path": ""}, "'' does not name a folder"),
        ({"store_dtype": "bfloat16"}, "store_dtype='bfloat16'"),
        ({"path": "/proc/no/such"}, "'/proc/no/such'"),
        ({"path": __file__}, "test_view.py"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        SoftLabelCache(**arguments)


def test_a_closed_cache_says_so(cache: SoftLabelCache) -> None:
    view = cache.view(KEY)
    view.put([1], {"logits": logits(1)})
    cache.close()
    cache.close()
    for call in (
        lambda: view.get([1]),
        lambda: view.put([1], {"logits": logits(1)}),
        cache.flush,
        cache.keys,
        view.ids,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    with pytest.raises(ClosedError, match="closed"):
        cache.view(KEY)


def test_forks_and_ends_of_a_program(tmp_path: Path) -> None:
    code = f"""
import os, threading, warnings
import numpy as np
warnings.simplefilter("ignore")  # of forking with threads, which is the point here
from edl.distill.cache import SoftLabelCache
from edl.errors import ClosedError
from tests.fast.distill.cache.conftest import KEY, rows
cache = SoftLabelCache(path={str(tmp_path)!r})
view = cache.view(KEY)
view.put([1, 2], rows([1, 2]))
held, done = threading.Event(), threading.Event()
def hold():  # another thread, which the child will not have
    with cache.lock, cache.folder._writing._lock:
        held.set()
        done.wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait(60)
if os.fork() == 0:
    for call in (lambda: view.get([1]), lambda: view.put([1], rows([1])), cache.keys):
        try:
            call()
        except ClosedError as exc:
            assert "open a new one" in str(exc)
        else:
            os._exit(1)
    cache.close()
    raise SystemExit(0)  # with exit handlers, which must not wait for the parent's thread
assert os.wait()[1] == 0
done.set()
"""
    subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=True)
    assert found(tmp_path, [1, 2]) == [True, True]


class CacheModel(RuleBasedStateMachine):
    """Against a dict: what is found is what was put last; with an unbounded disk everything is found."""

    folder: Path
    count = 0

    @initialize(
        memory=st.sampled_from([0, 2000, 1 << 20]),
        disk=st.sampled_from([None, "unbounded", 1 << 20]),
        half=st.booleans(),
    )
    def start(self, memory: int, disk: int | str | None, half: bool) -> None:
        CacheModel.count += 1
        self.path = None if disk is None else self.folder / str(CacheModel.count)
        self.memory, self.disk = memory, disk
        self.bound = disk if isinstance(disk, int) else None
        self.half: Any = "float16" if half else None
        self.model: dict[int | str, int] = {}
        self.version = 0
        self.cache: SoftLabelCache | None = None
        self.reopen()

    @property
    def view(self) -> CacheView:
        return self.cache.view(KEY)

    def complete(self) -> bool:
        return self.disk == "unbounded" or (self.disk is None and self.memory == 1 << 20)

    def rows(self, ids: list[int | str]) -> Array:
        """A row tells its id and its version. Large, so that a disk of 1 MiB soon is full."""
        out = np.zeros((len(ids), 3200), np.float32)
        for row, sample in enumerate(ids):
            out[row, 0] = sample if isinstance(sample, int) else 100 + int(sample)
            out[row, 1:] = self.model[sample]
        return out

    @rule()
    def reopen(self) -> None:
        if self.cache is not None:
            self.cache.close()
        if self.path is None:
            self.model.clear()
        self.cache = SoftLabelCache(self.memory, self.path, self.bound, store_dtype=self.half)

    IDS = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 30).map(str)), max_size=20, unique=True)

    @rule(ids=IDS)
    def put(self, ids: list[int | str]) -> None:
        self.version += 1
        self.model.update(dict.fromkeys(ids, self.version))
        self.view.put(ids, {"logits": self.rows(ids)})

    @rule(ids=IDS)
    def get(self, ids: list[int | str]) -> None:
        found = self.view.get(ids)
        there = [sample for sample, is_there in zip(ids, found.mask, strict=True) if is_there]
        assert set(there) <= self.model.keys()
        if there:
            np.testing.assert_array_equal(found.outputs["logits"], self.rows(there))  # type: ignore[arg-type]
        if self.complete():
            assert set(there) == set(ids) & self.model.keys()
            assert self.view.contains(ids).tolist() == found.mask.tolist()

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @invariant()
    def bounds_hold(self) -> None:
        stats = self.cache.stats()
        assert stats.memory_bytes <= self.memory
        assert self.bound is None or (self.path / "labels.sqlite").stat().st_size <= self.bound
        assert not stats.failed_writes

    def teardown(self) -> None:
        if getattr(self, "cache", None) is not None:
            self.cache.close()  # type: ignore[union-attr]


def test_the_cache_is_a_dict_that_may_forget(tmp_path: Path) -> None:
    class Machine(CacheModel):
        folder = tmp_path

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
