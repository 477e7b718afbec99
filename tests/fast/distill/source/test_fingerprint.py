"""What the training loop gets with a label is what the teacher saw, or there is an error; and no error without need."""

from __future__ import annotations

import array
import itertools
import mmap
import threading
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edl.distill.datasets.kinds import IterableData, SequenceData
from edl.distill.pipeline.epoch import Epoch
from edl.distill.source.checksum import Checksum, TimeBudget
from edl.distill.source.chunk import Chunk
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter, SampleListCutter
from edl.distill.source.fingerprint import ItemFingerprint
from edl.distill.source.reuse import ReuseDetector
from edl.distill.transport.request import Payload
from edl.errors import SourceError

ALWAYS, NEVER = TimeBudget(1.0, always=True), TimeBudget(-1e9)
X = {"x": itemgetter(0)}


def item_of(value: Any, cutter: type[Cutter] = BatchCutter, **getters: Any) -> Any:
    return cutter(getters or X, None, 1).put(value)[0]


def expect(item: Any, changed: bool) -> None:
    if changed:
        with pytest.raises(SourceError, match="yield a new array each time"):
            ReuseDetector().check_delivered(item)
    else:
        ReuseDetector().check_delivered(item)


class EchoLabels:
    """Answers each chunk with copies of its rows as they are when it is sent, in a thread of its own."""

    memory_bytes = 1 << 30
    linger_s = 0.1
    depth = 8

    def check(self) -> None: ...
    def prepare_epoch(self) -> None: ...
    def backlog(self, route: int | None) -> float:
        return 0.0

    @property
    def limits(self) -> Any:
        return self

    def max_rows(self, stopped: Callable[[], bool], route: int | None) -> int:
        return 0

    def max_sequence(self, route: int | None) -> int:
        return 0

    def set_awaited(self, chunk: Chunk) -> None: ...
    def cancel(self, chunks: Iterable[Chunk]) -> None: ...
    def record_delivery(self, rows: int) -> None: ...
    def record_wait(self, seconds: float, source_s: float) -> None: ...

    def estimate_answers(self, chunk: Chunk) -> None: ...
    def submit(self, chunk: Chunk, changed: Callable[..., None], stopped: Callable[[], bool]) -> None:
        rows = {"y": chunk.fields["x"].copy()}

        def answer() -> None:
            chunk.outputs[0] = rows  # type: ignore[assignment]
            changed()

        threading.Thread(target=answer).start()


def delivered(source: Iterable[Any], cutter: Cutter) -> Iterator[tuple[Any, Any]]:
    """Each item's input, of its first request, as the loop has it, and as the teacher saw it."""
    epoch = Epoch(EchoLabels(), iter(source), cutter)
    try:
        for item in epoch:
            chunk, start, stop = item.parts[0]
            yield item.value[0][: stop - start], chunk.outputs[0]["y"][start:stop]  # type: ignore[index]
            epoch.taken(item)
    finally:
        epoch.close()


def digits(rows: int) -> Iterator[Any]:
    """Images whose corners are dark, as those of MNIST are."""
    random = np.random.default_rng(0)
    while True:
        images = np.zeros((rows, 28, 28), np.uint8)
        images[:, 6:22, 6:22] = random.integers(0, 256, (rows, 16, 16))
        yield images


@pytest.mark.parametrize("rows", [16, 64, 640])
def test_no_label_of_a_refilled_buffer(rows: int) -> None:
    """A guard that looked at the same few elements of each row was blind here."""

    refilled = threading.Event()

    def source() -> Iterator[Any]:
        buffer = np.empty((rows, 28, 28), np.uint8)
        for number, images in enumerate(itertools.islice(digits(rows), 20)):
            buffer[:] = images
            if number:
                refilled.set()
            yield buffer, 0

    mislabelled: list[bool] = []

    def train() -> None:
        for seen, taught in delivered(source(), BatchCutter(X, None, 1)):
            mislabelled.append(not np.array_equal(seen, taught))
            refilled.wait(30)  # on a busy machine the two threads may take turns, so that no label is wrong

    with pytest.raises(SourceError, match=r"batch \d+ changed while .* \(\[0\]\)"):
        train()
    assert sum(mislabelled) <= 1, "one may be filled again while it is in use; then the next step is an error"


def test_buffer_filled_in_use_is_noticed() -> None:
    """The training loop waits for the source, so each item is delivered before the next one is filled in."""
    loop_has_it, filled = threading.Semaphore(0), threading.Semaphore(0)

    def source() -> Iterator[Any]:
        buffer = np.zeros((4, 3))
        for number in range(5):
            if number:
                loop_has_it.acquire(timeout=10)
            buffer[:] = number
            yield buffer, 0
            filled.release()

    def use(value: Any) -> float:
        loop_has_it.release()
        assert filled.acquire(timeout=10)
        return float(value[0, 0])

    used: list[float] = []
    items = delivered(source(), BatchCutter(X, None, 1))
    with pytest.raises(SourceError, match="or while it was in use"):
        used.extend(use(value) for value, _ in items)
    assert len(used) <= 2


def test_a_loop_may_work_in_place() -> None:
    """On arrays of its own, and on views of a data set of which each row comes once."""
    images = np.ones((12, 3))
    for seen, taught in delivered(((images[at : at + 2], 0) for at in range(0, 12, 2)), BatchCutter(X, None, 1)):
        np.testing.assert_array_equal(seen, taught)
        seen += 7


@pytest.mark.parametrize("cutter", [SampleCutter, BatchCutter])
def test_decoding_samples_are_not_accused(cutter: type[Cutter]) -> None:
    """They make an array for the moment, in memory that was freed by the one before."""

    class Lazy:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getitem__(self, at: int) -> Any:
            return np.full((1, 50_000), self.number, np.uint8)

    for seen, taught in delivered(map(Lazy, range(200)), cutter(X, 4, 1)):
        np.testing.assert_array_equal(np.asarray(seen).reshape(-1), taught.reshape(-1))


def test_samples_are_copied_as_they_come() -> None:
    buffer = np.zeros(3)
    cutter = SampleCutter(X, 2, 1)
    items = []
    for number in (1, 2):
        buffer[:] = number
        item, ready = cutter.put((buffer, "label"))
        items.append(item)
    assert ready[0].fields["x"].tolist() == [[1] * 3, [2] * 3], "the teacher gets each as it was"
    expect(items[0], changed=True)
    expect(items[1], changed=False)


def refills() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Items, and what a source does to them."""
    large = np.arange(200_000, dtype=np.float32).reshape(100, 2000)
    strided = np.arange(400_000, dtype=np.int64).reshape(400, 1000)[::2, ::-3]
    return {
        "small": ((np.zeros((4, 3)), 0), lambda item: item[0].fill(1)),
        "one element": ((large.copy(), 0), lambda item: item[0].__setitem__((57, 1234), 0.5)),
        "rows change places": ((large.copy(), 0), lambda item: item[0].__setitem__(slice(None), item[0][::-1].copy())),
        "strided": ((strided.copy()[::2, ::-1], 0), lambda item: item[0].__setitem__((3, 7), -1)),
        "a label": ((large, np.zeros(100)), lambda item: item[1].fill(1)),
        "a list": ([large, 0], lambda item: item.__setitem__(0, large.copy())),
        "a list of numbers": (([[1, 2], [3, 4]], 0), lambda item: item[0][1].__setitem__(0, 9)),
        "bytes": (([b"a", b"b"], 0), lambda item: item[0].__setitem__(0, b"a\0")),
        "objects": ((np.array([b"a", b"b"], object), 0), lambda item: item[0].__setitem__(0, b"a\0")),
        "a bytearray": ((bytearray(b"abc"), 0), lambda item: item[0].__setitem__(0, 7)),
        "a memoryview": ((memoryview(bytearray(b"abc")), 0), lambda item: item[0].__setitem__(0, 7)),
        "a dictionary": ({0: large, "label": 1}, lambda item: item.__setitem__(0, large.copy())),
        "a user's dictionary": (UserDict({0: large, "label": 1}), lambda item: item.__setitem__(0, large.copy())),
    }


@pytest.mark.parametrize("name", refills())
def test_a_refilled_item_is_noticed(name: str) -> None:
    value, refill = refills()[name]
    item = item_of(value)
    expect(item_of(value), changed=False)
    refill(value)
    expect(item, changed=True)


def test_a_refilled_object_is_noticed() -> None:
    batch = SimpleNamespace(x=np.zeros((2, 2)), cached=None)
    getters = {"x": lambda value: value.x}
    item = item_of(batch, **getters)
    batch.cached = "something else"
    expect(item, changed=False)
    item = item_of(batch, **getters)
    batch.x = np.zeros((2, 2))
    expect(item, changed=True)


def test_a_refilled_tensor_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.bool):
        for rows in (2, 400):
            tensor = torch.ones((rows, 300)).to(dtype)
            item = item_of((tensor, tensor.T))
            expect(item_of((tensor, tensor.T)), changed=False)
            tensor[-1, -1] = 0
            expect(item, changed=True)
    tensor = torch.ones(3, 3)
    item = item_of((tensor, 0))
    tensor.set_(torch.ones(3, 3))
    expect(item, changed=True)


@pytest.mark.parametrize("how", ["set_value", "assign", "item", "add_"])
def test_a_refilled_paddle_tensor_is_noticed(how: str) -> None:
    paddle = pytest.importorskip("paddle")
    refill = {
        "set_value": lambda tensor: tensor.set_value(np.zeros((300, 100), np.float32)),  # which paddle does not count
        "assign": lambda tensor: paddle.assign(paddle.zeros([300, 100]), tensor),
        "item": lambda tensor: tensor.__setitem__((7, 9), 0.0),
        "add_": lambda tensor: tensor.add_(paddle.ones([300, 100])),
    }[how]
    tensor = paddle.ones([300, 100])
    item = item_of((tensor, 0))
    expect(item_of((tensor, 0)), changed=False)
    refill(tensor)
    expect(item, changed=True)


def test_a_buffer_may_be_resized_meanwhile() -> None:
    buffer = bytearray(b"abc")
    cutter = SampleListCutter({"x": itemgetter("x")}, 8, 1)
    item, _ = cutter.put([{"x": np.zeros(3), "raw": buffer}])
    buffer += b"more"
    expect(item, changed=True)


@settings(max_examples=60)
@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.unsigned_integer_dtypes(endianness=">"),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    ),
    st.integers(0, 2),
)
def test_any_array_is_like_itself(array: Any, view: int) -> None:
    """Also NaN, dates, complex numbers, no elements, no dimension, gaps, and broadcast arrays."""
    if view == 1:
        array = array.T[::-1] if array.ndim else array
    if view == 2:
        array = np.broadcast_to(array, (3, *array.shape))
    assert Checksum.of(array, ALWAYS).matches(array, ALWAYS)


@given(st.integers(5_000, 60_000), st.integers(1, 2**62), st.data())
def test_a_whole_look_sees_every_byte(size: int, seed: int, data: st.DataObject) -> None:
    array = np.random.default_rng(seed).integers(0, 256, size * 8 + seed % 8, np.uint8)
    before = Checksum.of(array, ALWAYS)
    array[data.draw(st.integers(0, len(array) - 1))] ^= data.draw(st.integers(1, 255))
    assert not before.matches(array, ALWAYS)


def test_a_look_at_some_words_misses_little() -> None:
    """A hundredth of all words changes: of a thousand looks at 1,024 words not one may miss it (0.99**1024 = 3e-5)."""
    random = np.random.default_rng(1)
    words = random.integers(0, 2**63, 500_000)
    changed = words.copy()
    changed[random.permutation(len(words))[: len(words) // 100]] += 1
    assert sum(Checksum.of(words, NEVER).matches(changed, NEVER) for _ in range(200)) <= 1
    assert not Checksum.of(words, NEVER).columns


def test_looks_take_their_share_of_time() -> None:
    share = TimeBudget(0.5)
    assert share.available
    share.spend(3600)
    assert not share.available
    assert TimeBudget(0.0, always=True).available


def test_idle_time_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("edl.distill.source.checksum.time.perf_counter", lambda: now[0])
    share = TimeBudget(0.02)
    now[0] += 3600.0
    assert share.available
    share.spend(0.03)
    assert not share.available, "an hour without work allows no more than a moment does"
    now[0] += 1.0
    assert share.available


def test_a_made_array_is_not_kept() -> None:
    """Nobody but the chunk has it, so it cannot change; keeping it would double the memory of samples that decode."""
    assert not ItemFingerprint("sample 0", object(), {"x": np.zeros(9)}, ALWAYS)._parts
    shared = np.zeros(9)
    assert len(ItemFingerprint("sample 0", object(), {"x": shared}, ALWAYS)._parts) == 1
    assert len(ItemFingerprint("sample 0", object(), {"x": shared[1:]}, ALWAYS)._parts) == 1


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
def test_refilling_data_sets_are_read_right(kind: str) -> None:
    class Refilled(list[Any]):
        buffer = np.zeros(2)

        def __getitem__(self, at: Any) -> Any:
            self.buffer[:] = at
            return (self.buffer,)

        def __iter__(self) -> Iterator[Any]:
            return (self[at] for at in range(len(self)))

    samples = Refilled([None] * 6)
    data = SequenceData(samples, X) if kind == "indexed" else IterableData(lambda: samples, X)
    found = [fields["x"][:, 0].tolist() for _, fields in data.batches(4, lambda ids: np.zeros(len(ids), bool))]
    assert found == [[0, 1, 2, 3], [4, 5]], "each sample as it was when it was loaded"


def test_what_is_kept_is_sent_as_it_was() -> None:
    """Else the cache would hold a label of what the buffer became, under the id of what it was."""
    array = np.zeros((2, 3))
    kept, sent = Payload.of({"x": array}, None, copy=True), Payload.of({"x": array}, None)
    array += 1
    assert not any(kept.raw[0])
    assert np.shares_memory(np.asarray(sent.raw[0]), array), "without a cache there is no need to copy"


def test_samples_of_clashing_types_are_named() -> None:
    with pytest.raises(SourceError, match="sample 1: input 'x' is float64, samples before it int64, and no type"):
        item_of([(2**60 + 1,), (0.5,)], SampleListCutter)
    with pytest.raises(SourceError, match=r"no type holds both"):
        item_of([(np.uint64(2**63),), (-1,)], SampleListCutter)
    with pytest.raises(SourceError, match=r"no type holds both"):
        item_of([(b"a",), (1,)], SampleListCutter)
    cutter = SampleListCutter(X, 3, 1)
    _, (chunk,) = cutter.put([(1,), (0.5,), (True,)])
    assert chunk.fields["x"].tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["matrix", "masked"])
def test_subclasses_of_arrays_are_looked_at(kind: str) -> None:
    """A matrix, such as SciPy's `todense` gives, as input; and a masked array beside one."""
    plain = np.arange(50_000.0).reshape(100, 500)
    array = plain.view(np.matrix) if kind == "matrix" else np.ma.masked_equal(plain, 7.0)
    item = item_of({"x": array if kind == "matrix" else plain.copy(), "beside": array}, x=itemgetter("x"))
    assert item.rows == 100
    expect(item, changed=False)
    array[99, 499] = -1.0
    expect(item, changed=True)


class Wrapped:
    """What other frameworks have: no array, but numpy makes one of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype=dtype)


class Interface:
    """A picture, as Pillow has it: bytes that are made when they are asked for."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": self.array.shape, "typestr": "|u1", "version": 3, "data": self.array.tobytes()}


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "__array__": Wrapped,
    "a list of __array__": lambda rows: [Wrapped(row) for row in rows],
    "__array_interface__": Interface,
    "deque": lambda rows: deque(list(rows)),
    "deque of lists": lambda rows: deque([list(rows[:2]), list(rows[2:])]),
    "UserList": lambda rows: UserList(list(rows)),
    "memoryview": memoryview,
    "ctypes": lambda rows: np.ctypeslib.as_ctypes(rows),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("cutter", [BatchCutter, SampleCutter])
def test_refilled_input_of_any_type(kind: str, cutter: type[Cutter]) -> None:
    buffer = np.arange(16, dtype=np.uint8).reshape(4, 4)
    expect(item_of((FOREIGN[kind](buffer), 1), cutter), changed=False)
    item = item_of((FOREIGN[kind](buffer), 1), cutter)
    buffer[3, 2] += 1
    expect(item, changed=True)


def test_refilled_strings_of_any_type() -> None:
    words = deque(["a", "b"])
    item = item_of((Wrapped(list(words)), words))
    expect(item, changed=False)
    item = item_of((Wrapped(words), 1))
    words[1] = "c"
    expect(item, changed=True)


def test_input_that_is_gone_is_an_error() -> None:
    """A file that is closed by then: nobody can see that it is what the teacher saw."""
    wrapped = Wrapped(np.zeros((2, 2)))
    item = item_of((wrapped, 1))
    del wrapped.array
    with pytest.raises(SourceError, match="cannot be looked at again"):
        ReuseDetector().check_delivered(item)


PASSED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "array.array": (array.array("i", [0, 0]), lambda held: held.__setitem__(0, 1)),
    "deque": (deque([1, 2]), lambda held: held.rotate(1)),
    "UserList": (UserList([1, 2]), lambda held: held.append(1)),
    "set": ({1, 2}, lambda held: held.add(3)),
    "mmap": (mmap.mmap(-1, 4096), lambda held: held.__setitem__(7, 1)),
}


@pytest.mark.parametrize("kind", PASSED)
def test_refilled_container_is_noticed(kind: str) -> None:
    held, refill = PASSED[kind]
    item = item_of((np.zeros((2, 2)), held))
    expect(item, changed=False)
    refill(held)
    expect(item, changed=True)


def test_refilled_picture_is_noticed() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture = image.new("L", (8, 8))
    item = item_of((picture, 1), SampleCutter)
    expect(item, changed=False)
    picture.paste(image.new("L", (3, 3), 9))
    expect(item, changed=True)
