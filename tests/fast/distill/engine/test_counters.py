"""What a reader counts of teachers that come, go and come again: labels do not pile up, and sums never fall."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.counters import EngineCounters
from edl.distill.metrics import export
from edl.distill.stats import ReaderStats


class Reader:
    def __init__(self) -> None:
        self.counters = EngineCounters()

    def stats(self) -> ReaderStats:
        return self.counters.stats(Dispatcher(), lambda name: ("ready", ""), "")


def series(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["teacher"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def answer(reader: Reader, teacher: str, rows: int = 4) -> None:
    counts = reader.counters.teacher(teacher)
    counts.rows += rows
    counts.requests += 1


def test_labels_of_those_that_left_go() -> None:
    reader, registry = Reader(), CollectorRegistry()
    collector = export(reader, registry=registry)
    for number in range(500):
        reader.counters.add_teacher(f"pod-{number}", "h:1")
        answer(reader, f"pod-{number}")
        reader.counters.remove_teacher(f"pod-{number}")
    reader.counters.add_teacher("pod-500", "h:1")
    rows = series(registry, "edl_reader_teacher_rows_total")
    assert rows == {"departed": 2000.0, "pod-500": 0.0}
    assert series(registry, "edl_reader_teacher_in_flight") == {"pod-500": 0.0}, "a gauge of nobody is none"
    assert len(reader.stats().teachers) == 101, "a person may still read of the last hundred"
    assert reader.stats().teachers["pod-499"].state == "gone"
    registry.unregister(collector)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["begin", "answer", "end"])), max_size=40))
def test_no_series_falls_but_by_coming_anew(events: list[tuple[str, str]]) -> None:
    reader, registry = Reader(), CollectorRegistry()
    collector = export(reader, registry=registry)
    total, departed, answered = 0.0, 0.0, 0
    for teacher, event in events:
        if event == "begin" and teacher in reader.counters._teachers.present:
            continue
        if event == "begin":
            reader.counters.add_teacher(teacher, "h:1")
        elif event == "end":
            reader.counters.remove_teacher(teacher)
        else:
            answer(reader, teacher)
            answered += 4
        rows = series(registry, "edl_reader_teacher_rows_total")
        assert sum(rows.values()) == answered >= total
        assert rows.get("departed", 0.0) >= departed
        total, departed = sum(rows.values()), rows.get("departed", 0.0)
    registry.unregister(collector)
