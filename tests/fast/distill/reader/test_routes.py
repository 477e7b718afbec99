"""Samples go to the teachers of their domain, and come back in order, each exactly once."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.cache import SoftLabelCache
from edl.distill.source import cutters
from edl.errors import SettingsError, SourceError
from tests.fast.distill.conftest import Register, Serve, Served
from tests.waiting import DEADLINE_S

DOMAINS = {"math": 1.0, "code": 10.0, "law": 100.0}


@pytest.fixture(scope="module")
def teachers() -> Iterator[dict[str, str]]:
    """A teacher of each domain, whose labels are the sample times its domain's factor."""
    found = {name: Served("echo", scale=scale) for name, scale in DOMAINS.items()}
    yield {name: teacher.endpoint for name, teacher in found.items()}
    for teacher in found.values():
        teacher.close()


def samples(count: int, seed: int = 0) -> list[tuple[Any, str, int]]:
    """Mostly math, some code, and rarely law."""
    domains = np.random.default_rng(seed).choice(list(DOMAINS), count, p=[0.8, 0.18, 0.02])
    return [(np.full(4, number, np.float32), str(domain), number) for number, domain in enumerate(domains)]


def check(delivered: Any, count: int) -> None:
    delivered = list(delivered)
    assert [number for _, _, number, _ in delivered] == list(range(count))
    for x, domain, number, y in delivered:
        assert y.tolist() == (x * DOMAINS[domain]).tolist(), f"sample {number} of {domain}"


def reader_of(teachers: Any, found: list[Any] | None = None, **settings: Any) -> DistillReader:
    reader = DistillReader(["x", None, None], ["y"], teachers=teachers, route=1, **settings)
    return reader if found is None else reader.set_sample_generator(lambda: iter(found))


@pytest.mark.parametrize("memory_bytes", [512 << 20, 1 << 20])
def test_samples_in_order(teachers: dict[str, str], memory_bytes: int) -> None:
    found = samples(1000)
    with reader_of(teachers, found, options=Options(memory_bytes=memory_bytes)) as reader:
        check(reader(), 1000)
        asked = {name: route.rows_asked for name, route in reader.stats().routes.items()}
    assert asked == Counter(domain for _, domain, _ in found)


def test_lists_and_batches_are_put_together(teachers: dict[str, str]) -> None:
    found = samples(300)
    lists = [found[start : start + 7] for start in range(0, 300, 7)]
    lists[:3] = [[], *lists[:2], [], lists[2], []]
    with reader_of(teachers) as reader:
        delivered = list(reader.set_sample_list_generator(lambda: iter(lists))())
    assert [len(part) for part in delivered] == [len(part) for part in lists]
    check(itertools.chain.from_iterable(delivered), 300)
    for rows in (None, 5):
        with reader_of(teachers, teacher_batch_size=rows) as reader:
            reader.set_batch_generator(lambda: (stacked(part) for part in lists if part))
            check(itertools.chain.from_iterable(zip(*batch, strict=True) for batch in reader()), 300)


def stacked(part: list[Any]) -> tuple[Any, ...]:
    xs, domains, numbers = zip(*part, strict=True)
    return np.stack(xs), list(domains), np.array(numbers)


def test_an_unknown_value_is_an_error(teachers: dict[str, str]) -> None:
    """What came before it is delivered; with teachers for all other values there is none."""
    found = samples(40)
    found[33] = (found[33][0], "art", 33)
    with reader_of(teachers).set_batch_generator(lambda: (stacked([sample]) for sample in found)) as reader:
        epoch = reader()
        assert len(list(itertools.islice(epoch, 33))) == 33
        with pytest.raises(SourceError, match=r"batch 33, row 0 has route 'art', .* 'math', 'code', 'law'"):
            next(epoch)
    with reader_of({"math": teachers["math"], "code": teachers["code"], None: teachers["law"]}, found) as reader:
        for x, domain, _, y in reader():
            assert y.tolist() == (x * DOMAINS.get(domain, 100.0)).tolist()
        assert list(reader.stats().routes) == ["math", "code", None]


def test_an_outage_stops_only_what_is_behind(
    serve: Serve, register: Register, url: str, teachers: dict[str, str]
) -> None:
    """A domain's teachers come late, are lost and come again: what is before its samples goes on."""
    found = samples(600)
    found[:60] = [(x, "math", number) for x, _, number in found[:60]]
    found[60] = (found[60][0], "code", 60)
    there = {"math": teachers["math"], "law": teachers["law"], "code": Teachers("coders", discovery=url)}
    lost = threading.Event()

    def source() -> Iterator[Any]:
        yield from found[:300]
        assert lost.wait(DEADLINE_S)
        yield from found[300:]

    with reader_of(there).set_sample_generator(source) as reader:
        epoch = reader()
        delivered = list(itertools.islice(epoch, 60))
        first = serve("echo", scale=10.0)
        register(first.endpoint, "coders", "first")
        delivered += itertools.islice(epoch, 100)
        first.close()
        lost.set()
        register(serve("echo", scale=10.0).endpoint, "coders", "second")
        delivered += epoch
        assert reader.stats().teachers["second"].rows
    check(delivered, 600)


@pytest.mark.parametrize("overtaking", [cutters._MOST_OVERTAKING, 10**9])
def test_a_rare_domain_is_not_waited_for(
    teachers: dict[str, str], monkeypatch: pytest.MonkeyPatch, overtaking: int
) -> None:
    """A request that is full does not keep back the one that is not, and that the training loop waits for."""
    monkeypatch.setattr(cutters, "_MOST_OVERTAKING", overtaking)
    found = [
        (np.full(4, at, np.float32), "math" if at in (0, 150) else "code", at, bytes(1 << 16)) for at in range(300)
    ]
    options = Options(linger_s=300.0, memory_bytes=1 << 20)  # room for two requests
    with reader_of(teachers, found, teacher_batch_size=8, options=options) as reader:
        check(((x, domain, number, y) for x, domain, number, _, y in reader()), 300)


def test_outputs_must_be_alike(serve: Serve, teachers: dict[str, str]) -> None:
    words = r"of '\w+' and of '\w+' cannot be combined: .*output 'y' with rows of shape"
    reader = reader_of({**teachers, "code": serve("echo", repeat=2).endpoint}, samples(100))
    with reader, pytest.raises(SettingsError, match=words):
        list(reader())


def test_labels_are_kept_by_domain(teachers: dict[str, str]) -> None:
    """The same id in another domain is another label; models of one name and version are told apart by service."""
    cache = SoftLabelCache(memory_bytes=1 << 22)
    first = samples(300)
    other = [(x, "code" if domain == "math" else domain, number) for x, domain, number in first]
    asked = []
    for found in (first, first, other, other):
        with reader_of(teachers, cache=cache, id_field=2) as reader:
            check(reader.set_sample_generator(functools.partial(iter, found))(), 300)
            asked.append(reader.stats().rows_asked)
    assert asked == [300, 0, sum(domain == "math" for _, domain, _ in first), 0]
