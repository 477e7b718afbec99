"""What a reader's Prometheus metrics say of hedges, and of teachers that were left alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from edl.distill import DistillReader, Options
from edl.distill.metrics import export
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, reader_of, samples


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"reader": "r", **labels})
    assert found is not None, f"there is no {name} {labels}"
    return found


def exported(reader: DistillReader) -> CollectorRegistry:
    registry = CollectorRegistry()
    export(reader, "r", registry)
    return registry


def test_teachers_set_aside_count_by_reason(start: Start) -> None:
    good, bad = start("echo", delay_s=0.005), start("nan", serve={"check-nan": False})
    full = start("echo", delay_s=0.005, serve={"max-streams": 1})
    with reader_of(full) as holder, reader_of(good, bad, full) as reader:
        holder.set_sample_generator(samples(4000))
        next(holder())
        registry = exported(reader)
        for reason in ("overloaded", "bad output", "lost", "error", "timeout", "rejected"):
            assert value(registry, "edl_reader_set_aside_total", reason=reason) == 0
        reader.set_sample_generator(samples(200))

        def both_aside() -> bool:  # either may have been connected to after the first epoch
            check(list(reader()), 200)
            reasons = ("bad output", "overloaded")
            return all(value(registry, "edl_reader_set_aside_total", reason=reason) >= 1 for reason in reasons)

        until(both_aside, 60)
        assert value(registry, "edl_reader_set_aside_total", reason="error") == 0


def test_hedges_are_counted(start: Start) -> None:
    quick, slow = start("echo", delay_s=0.005), start("echo", delay_s=0.005, straggle=0.3, straggle_factor=30)
    full_requests = Options(teacher_timeout_s=60, linger_s=30.0)  # a source without time for a moment is not silent
    with reader_of(quick, slow, options=full_requests) as reader:
        registry = exported(reader)
        reader.set_sample_generator(samples(4000))
        epoch = reader()
        begun = [next(epoch)]
        assert value(registry, "edl_reader_bytes_held") > 0
        until(lambda: reader.stats().teachers_live == 2, 30)  # else the quick one may answer all before the other comes
        check(begun + list(epoch), 4000)
        assert value(registry, "edl_reader_hedges_total") * 4 == value(
            registry, "edl_reader_rows_total", event="hedged"
        )
        assert value(registry, "edl_reader_hedges_total") > 0
