"""An engine's parts: which teachers it keeps, counts and uses, and the collector of a process that forks."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from edl.discovery import Instance, Snapshot
from edl.discovery.records import Rejected
from edl.distill.compress import top_k
from edl.distill.dispatch.actions import FailureKind
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.compatibility import TeacherCompatibility, outputs_disagreement
from edl.distill.engine.connection import ConnectionPool, no_counts
from edl.distill.engine.engine import Engine, LabelJob
from edl.distill.engine.event_loop import EventLoopThread, _GarbageGuard
from edl.distill.metrics import export
from edl.distill.options import Options, Policy
from edl.distill.stats import ReaderStats
from edl.distill.transport.request import Payload
from edl.distill.transport.schema import ModelSpec, OutputSpec, Reply, TensorMetadata
from edl.errors import NoTeacherError, SettingsError
from tests.waiting import DEADLINE_S, wait_until


def test_job_of_a_closed_engine_is_called_back() -> None:
    """A job that waits when the engine closes has a caller, which could wait for ever."""
    heard: list[object] = []
    thread = EventLoopThread.acquire()
    try:
        engine = Engine("x", OutputSpec(("y",)), Options(), thread=thread, arena=None)
        thread.run(engine.close(), DEADLINE_S)
        payload = Payload.of({"x": np.zeros((1, 1), np.float32)}, None)
        engine.submit(LabelJob(0, payload, lambda result, _: heard.append(result), lambda: None))
        wait_until(lambda: heard)
    finally:
        thread.release()
    assert isinstance(heard[0], NoTeacherError)


def test_collector_is_on_after_the_last_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLoopThread, "used", True)
    states = []
    try:
        for step in ("before", "before", "after_in_parent", "after_in_parent"):
            getattr(_GarbageGuard, step)()
            states.append(gc.isenabled())
    finally:
        gc.enable()
    assert states == [False, False, False, True]


@dataclass
class FakeConnection:
    """In place of a connection: up for as long as `spec` is not None."""

    instance: Instance
    pool: ConnectionPool
    counts: Counter[str] = field(default_factory=no_counts)
    spec: object | None = None
    lapsed: bool = False
    unlisted: bool = False
    leaving: str = ""
    why: str = ""
    state: str = "set aside"
    lacks: bool = False
    closed: bool = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.closed = True


class World(ConnectionPool):
    """A pool of fake connections."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(Policy())
        super().__init__("s", OutputSpec(("y",)), Options(), self.dispatcher, changed=lambda actions: None)

    def see(self, *ready: str, lapsed: str = "", revoked: str = "", draining: str = "") -> None:
        """A new snapshot, of teachers with one letter each."""
        instances = [*map(_teacher, ready), *(_teacher(name, "draining") for name in draining)]
        gone = tuple(map(_teacher, lapsed))
        self.apply_snapshot(Snapshot("s", tuple(instances), lapsed=gone, revoked=frozenset(revoked)))

    def lack(self, *teachers: str) -> None:
        """They have answered, and lack what is asked for."""
        for name in teachers:
            self.connection(name).lacks, self.connection(name).why = True, "has no output 'y'"

    def up(self, name: str) -> None:
        """The teacher of that name is connected."""
        self.connection(name).spec = object()
        self.dispatcher.teacher_up(name, 0.0)

    def down(self, name: str) -> None:
        """Its connection breaks."""
        self.connection(name).spec = None
        self.connection_lost(self.connections[name])

    def connection(self, name: str) -> FakeConnection:
        return cast(FakeConnection, self.connections[name])

    @property
    def is_usable(self) -> str:
        """Teachers that the dispatcher would give work."""
        return "".join(sorted(name for name, state in self.dispatcher.teachers.items() if state.is_usable(1.0)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        coroutine.close()
        task: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())
        task.get_loop().close()
        return cast("asyncio.Task[None]", task)


def _teacher(name: str, state: Any = "ready") -> Instance:
    return Instance("s", name, "h", 1, state=state)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.distill.engine.connection.TeacherConnection", FakeConnection)


@pytest.fixture
def world() -> World:
    world = World()
    world.see("a", "b")
    world.up("a")
    world.up("b")
    return world


def test_one_that_the_registry_forgot_stays(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    assert world.is_usable == "ab", "Consul forgets in a minute what it cannot be told"
    world.see("b", "a")
    assert world.is_usable == "ab"
    world.see("b")
    assert world.is_usable == "b", "registered again, it left on purpose"


def test_forgotten_teacher_loses_connection(world: World) -> None:
    world.see("b", lapsed="a")
    world.see("b")
    world.down("a")
    assert world.is_usable == "b"
    assert "a" not in world.connections


def test_pool_closes_dropped_connections() -> None:
    """Also those that it is just closing: a task that is cancelled would leave a socket open."""

    async def drop_and_close() -> bool:
        world = World()
        world.see("a")
        dropped = world.connection("a")
        world._spawn = partial(ConnectionPool._spawn, world)  # type: ignore[method-assign]
        world.see()
        await world.close()
        return dropped.closed

    assert asyncio.run(drop_and_close())


def test_renewed_teacher_is_tried_at_once(world: World) -> None:
    world.see("b", lapsed="a")
    world.down("a")
    pausing = world.connection("a")
    world.see("a", "b")
    assert world.connection("a") is not pausing, "not when the long pause of a lapsed one is over"
    assert not world.connection("a").lapsed


def test_drain_and_revocation_end_lapsed(world: World) -> None:
    world.see(lapsed="ab")
    world.see(draining="a", revoked="b")
    assert world.is_usable == ""
    world.see(lapsed="a")
    assert world.is_usable == "", "it said that it drains"


def test_teachers_that_may_come_are_awaited() -> None:
    """A wait is in vain only where every teacher has answered, and none is on its way, or on its way out."""
    world = World()
    world.see()
    assert not world.lacking(), "teachers may start later than students"
    world.see("a", "b")
    world.lack("a")
    assert not world.lacking(), "one has not answered yet"
    world.lack("b")
    assert world.lacking() == "a: has no output 'y'; b: has no output 'y'"
    for others in ({"draining": "c"}, {"lapsed": "c"}):
        world.see("a", "b", **others)
        assert not world.lacking(), others
    world.see("a", "b")
    assert world.lacking()
    seen = Snapshot("s", (_teacher("a"), _teacher("b")))
    for other in (replace(seen, stale="away"), replace(seen, rejected=(Rejected("c", "no port"),))):
        world.apply_snapshot(other)
        assert not world.lacking(), other
    world.apply_snapshot(seen, whole=False)
    assert not world.lacking(), "the others are left to other students"


def series(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["teacher"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def test_labels_of_those_that_left_go() -> None:
    class Reader:
        """Of the teachers of `world`."""

        def stats(self) -> ReaderStats:
            teachers, departed = world.teacher_stats()
            pauses = {kind.value: count for kind, count in world.dispatcher.pauses.items()}
            return ReaderStats(teachers=teachers, departed=departed, set_aside=pauses)

    def answer(teacher: str) -> None:
        counts = world.counts_of(teacher)
        counts["rows"] += 4
        counts["requests"] += 1

    world, reader, registry = World(), Reader(), CollectorRegistry()
    export(reader, registry=registry)
    for number in range(501):
        world.see(f"pod-{number}")
        if number:
            answer(f"pod-{number - 1}")  # to a request that was on its way
        if number < 500:
            answer(f"pod-{number}")
    assert series(registry, "edl_reader_teacher_rows_total") == {"departed": 4000.0, "pod-500": 0.0}
    assert series(registry, "edl_reader_teacher_in_flight") == {"pod-500": 0.0}, "a gauge of nobody is none"
    assert len(reader.stats().teachers) == 101, "a person may still read of the last hundred"
    assert reader.stats().teachers["pod-499"].state == "gone"
    world.see("pod-500", "pod-499")
    answer("pod-499")
    rows = series(registry, "edl_reader_teacher_rows_total")
    assert rows == {"departed": 4000.0, "pod-500": 0.0, "pod-499": 4.0}, "one that comes again is counted anew"
    assert len(reader.stats().teachers) == 101
    world.dispatcher.pauses[FailureKind.BAD_OUTPUT] += 2
    for reason, count in (("bad output", 2), ("lost", 0)):
        labels = {"reader": "reader", "reason": reason}
        assert registry.get_sample_value("edl_reader_set_aside_total", labels) == count


INSTANCE = Instance("s", "t", "127.0.0.1", 1)


def spec(*shape: int, inputs: tuple[int, ...] = (-1,)) -> ModelSpec:
    return ModelSpec("m", "1", {"x": TensorMetadata("x", "FP32", inputs)}, {"y": TensorMetadata("y", "FP32", shape)})


def version(name: str, model: str = "m") -> ModelSpec:
    return ModelSpec(model, name, {}, {})


def agree(known: ModelSpec | None, k: int | None = None, mixed: Any = "warn", **asked: Any) -> TeacherCompatibility:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",), top_k=k, **asked), mixed)
    compatibility.spec = known
    return compatibility


def words(
    compatibility: TeacherCompatibility, *shape: int, dtype: str = "float32", inputs: tuple[int, ...] = (4, 5)
) -> str:
    failure = compatibility.check_reply("t", [("x", "FP32", inputs)], Reply({"y": np.zeros((4, *shape), dtype)}, "1"))
    return failure.message if failure is not None else ""


def version_words(compatibility: TeacherCompatibility, version: str) -> str:
    failure = compatibility.check_reply("t", [], Reply({}, version))
    return failure.message if failure is not None else ""


def test_only_fixed_metadata_must_agree() -> None:
    compatibility = agree(spec(-1, 997))
    assert [words(compatibility, length, 997) for length in (5, 7, 1, 5)] == [""] * 4
    assert "rows of shape [5, 998], earlier teachers' rows [-1, 997]" in words(compatibility, 5, 998)
    assert "1 dimensions, earlier teachers' rows are float32 with 2" in words(compatibility, 997)
    assert "rows of float16 with 2" in words(compatibility, 5, 997, dtype="float16")


def test_input_shape_fixes_output_shape() -> None:
    """Without metadata, inputs of one shape give outputs of one shape."""
    compatibility = agree(version("1"))
    assert words(compatibility, 5, 8, inputs=(4, 5)) == ""
    assert words(compatibility, 7, 8, inputs=(4, 7)) == ""
    assert words(compatibility, 5, 8, inputs=(9, 5)) == ""
    assert "rows of shape [5, 9], earlier teachers' rows [5, 8]" in words(compatibility, 5, 9, inputs=(4, 5))


def test_top_k_has_k_classes() -> None:
    def fits(known: tuple[int, ...], shape: tuple[int, ...], k: int = 3) -> bool:
        outputs: dict[str, Any] = {"y": top_k(np.zeros((2, *shape), "f4"), k)}
        return agree(spec(*known), k=3).check_reply("t", [("x", "FP32", (2, 5))], Reply(outputs, "1")) is None

    assert fits((-1, 9), (5, 9))
    assert fits((3, 9), (3, 9))
    assert not fits((3, 9), (4, 9))
    assert fits((-1, 2), (5, 2), k=2)
    assert not fits((9,), (9,), k=2)


def test_other_fixed_sizes_are_not_connected() -> None:
    compatibility = agree(spec(-1, 997))
    for shape in ((-1, 997), (5, 997)):
        assert compatibility.incompatibility(INSTANCE, spec(*shape)) == ""
    words = compatibility.incompatibility(INSTANCE, spec(-1, 10))
    assert "'y' with rows of shape [-1, 10], earlier teachers [-1, 997]" in words
    assert "rows of shape [997]" in compatibility.incompatibility(INSTANCE, spec(997))


@pytest.mark.parametrize(
    ("live", "expected"), [("", "1"), ("2", "2"), ("221", "1"), ("322", "2"), ("32", "2"), ("23", "2")]
)
def test_version_follows_the_live_teachers(live: str, expected: str) -> None:
    """It stays while somebody has it; else it is that of the most, and of as many the same one for every student."""
    compatibility = agree(version("1"))
    compatibility.select_version([version(name) for name in live])
    assert compatibility.spec == version(expected)


def test_a_mixture_is_refused_where_told_to() -> None:
    compatibility = agree(version("1"), mixed="refuse")
    assert version_words(compatibility, "1") == ""
    assert "version '2'" in compatibility.incompatibility(INSTANCE, version("2"))
    assert "labels are of '1'" in version_words(compatibility, "2")
    assert version_words(compatibility, ""), "an answer that does not say may be of any"
    compatibility.selecting_version = True
    assert compatibility.incompatibility(INSTANCE, version("2")) == "", "between two epochs all are looked at"
    compatibility.selecting_version = False
    compatibility.select_version([version("2")])
    assert version_words(compatibility, "2") == ""
    assert compatibility.refuses_version("1")


@pytest.mark.parametrize("selecting_version", [False, True])
def test_unknown_versions_are_not_equal(selecting_version: bool) -> None:
    for known in (None, version(""), version("1")):
        compatibility = agree(known, mixed="refuse")
        compatibility.selecting_version = selecting_version
        assert "--model-version" in compatibility.incompatibility(INSTANCE, version(""))
        assert known is None or "--model-version" in version_words(compatibility, "")
    for known in (None, version("")):
        lenient = agree(known)
        assert lenient.incompatibility(INSTANCE, version("")) == ""
        assert version_words(lenient, "") == ""


@pytest.mark.parametrize("mixed", ["warn", "refuse"])
def test_another_models_name_is_refused(mixed: str) -> None:
    compatibility = agree(version("1"), mixed=mixed)
    dogs = [version("1", "dogs"), version("1", "dogs"), version("2", "dogs")]
    for selecting_version in (False, True):
        compatibility.selecting_version = selecting_version
        for dog in dogs:
            words = compatibility.incompatibility(INSTANCE, dog)
            assert "it serves model 'dogs'" in words, "two models are no versions, between two epochs as well"
            assert "model=" in words, "the remedy is named"
    compatibility.select_version(dogs)
    assert compatibility.spec == version("1"), "labels would be kept under another name"
    compatibility.select_version([*dogs, version("2")])
    assert compatibility.spec == version("2")


@pytest.mark.parametrize(
    ("k", "words"), [(8, ""), (64, ""), (65, "top_k=65 is requested"), (None, "whole outputs are requested")]
)
def test_top_k_is_within_the_teachers(k: int | None, words: str) -> None:
    """A teacher that sends the 64 largest log-probabilities at most is refused by name where more is asked for."""
    known = replace(spec(9), outputs={"logprobs": TensorMetadata("logprobs", "FP32", (32000,))}, max_top_k=64)
    compatibility = TeacherCompatibility("s", OutputSpec(("logprobs",), top_k=k))
    why = compatibility.incompatibility(INSTANCE, known)
    assert (words in why) if words else not why
    assert not why or "set top_k=64 or less" in why


def tokenizer_words(compatibility: TeacherCompatibility, says: str = "", registered: str = "") -> str:
    """Why a teacher is not used whose configuration, or whose registration, tells this tokenizer."""
    meta = {"tokenizer": registered} if registered else {}
    return compatibility.incompatibility(replace(INSTANCE, meta=meta), replace(spec(9), tokenizer=says))


def test_another_tokenizer_is_refused() -> None:
    """What a teacher's configuration says, or else its instance in discovery, must be the student's."""
    student = partial(tokenizer_words, agree(None, tokenizer="aa"))
    assert not student("aa")
    assert not student("", "aa")
    assert "has tokenizer 'bb', but the student's is 'aa'" in student("bb", "aa")
    assert "has tokenizer 'bb', but the student's is 'aa'" in student("", "bb")
    assert "does not report its tokenizer" in student()


def test_two_tokenizers_are_never_mixed() -> None:
    """Nor among the services of a reader with routes. A teacher that tells none is believed, also the first."""
    one, other = replace(spec(9), tokenizer="aa"), replace(spec(9), tokenizer="bb")
    assert "tokenizer 'aa', model 'm' 'bb'" in outputs_disagreement(one, other, OutputSpec(("y",)))
    assert not outputs_disagreement(one, spec(9), OutputSpec(("y",)))
    for told in ("says", "registered"):
        compatibility = agree(None)
        assert not tokenizer_words(compatibility)
        compatibility.spec = spec(9)
        assert not tokenizer_words(compatibility, **{told: "aa"})
        assert "'bb', earlier teachers 'aa'" in tokenizer_words(compatibility, **{told: "bb"})
        assert not tokenizer_words(compatibility)


def test_rows_are_tokens_of_all_or_none() -> None:
    """Requests are filled as the first teacher's model says: another would cut sequences, or take rows for some."""
    of_tokens, of_rows = replace(spec(9), sequences="position"), spec(9)
    assert agree(of_tokens).incompatibility(INSTANCE, of_tokens) == agree(of_rows).incompatibility(INSTANCE, of_rows)
    words = agree(of_tokens).incompatibility(INSTANCE, of_rows)
    assert "has independent rows, earlier teachers rows that belong to sequences by input 'position'" in words
    words = agree(of_rows).incompatibility(INSTANCE, of_tokens)
    assert "by input 'position', earlier teachers independent" in words


def test_kept_labels_may_fix_the_input_shape() -> None:
    """Kept labels need inputs of one shape only where labels follow them."""
    short, long = {"x": np.zeros((2, 5), "f4")}, {"x": np.zeros((2, 8), "f4")}
    for known, k in ((spec(9), None), (spec(-1), 3), (version("1"), None)):
        for inputs in (short, long):
            agree(known, k).check_cacheable(inputs)
    compatibility = agree(spec(-1, 9))
    compatibility.check_cacheable(short)
    compatibility.check_cacheable({**short, "not sent": np.zeros((2, 1))})
    with pytest.raises(SettingsError, match=r"'y' \[-1, 9\]"):
        compatibility.check_cacheable(long)
