"""What can be seen of requests and teachers: a reader's Prometheus metrics, and one id for a request on both sides."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from edl.distill import DistillReader, Options
from edl.distill.dispatch.policy import Policy
from edl.distill.metrics import export
from edl.errors import BadOutputError
from tests.fast.distill.conftest import Serve
from tests.fast.distill.reading import check, reader_of, samples
from tests.waiting import wait_until

FULL_REQUESTS = Options(teacher_timeout_s=60, linger_s=30.0)
"""A source that gets no time for a moment is not silent."""
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"reader": "r", **labels})
    assert found is not None, f"there is no {name} {labels}"
    return found


def exported(reader: DistillReader) -> CollectorRegistry:
    registry = CollectorRegistry()
    export(reader, "r", registry)
    return registry


def test_teachers_set_aside_count_by_reason(serve: Serve) -> None:
    good, bad = serve("echo", delay_s=0.005), serve("nan", server={"check_nan": False})
    full = serve("echo", delay_s=0.005, server={"max_streams": 1})
    with reader_of(full) as holder, reader_of(good, bad, full) as reader:
        holding = holder.set_sample_generator(samples(4000))()
        next(holding)
        registry = exported(reader)
        for reason in ("overloaded", "bad output", "lost", "error", "timeout", "rejected"):
            assert value(registry, "edl_reader_set_aside_total", reason=reason) == 0
        reader.set_sample_generator(samples(100))

        def both_aside() -> bool:  # either may have been connected to after the first epoch
            check(list(reader()), 100)
            reasons = ("bad output", "overloaded")
            return all(value(registry, "edl_reader_set_aside_total", reason=reason) >= 1 for reason in reasons)

        wait_until(both_aside)
        assert value(registry, "edl_reader_set_aside_total", reason="error") == 0


def access_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_error_is_found_by_its_id(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "access.log"
    teacher = serve("raises", message="thirteen", server={"access_log": str(path)})
    options = Options(policy=Policy(task_failures=1))
    with DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=options) as reader:
        reader.set_batch_generator(lambda: iter([(np.full((2, 4), 13, np.float32),)]))
        with pytest.raises(BadOutputError) as raised:
            list(reader())
    found = re.search(r"\(request ([0-9a-f]{16})\)", str(raised.value))
    assert found is not None, str(raised.value)
    wait_until(lambda: any(line["id"] == found[1] for line in access_lines(path)))
    line = next(line for line in access_lines(path) if line["id"] == found[1])
    assert line["status"] == "INTERNAL"
    said = [record for record in caplog.records if found[1] in record.getMessage() and record.exc_info]
    assert said[0].levelno == logging.ERROR
    assert "thirteen" in str(said[0].exc_info)


def test_the_users_span_reaches_the_teacher(serve: Serve, tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    path = tmp_path / "access.log"
    teacher = serve("echo", server={"access_log": str(path)})
    context = trace.SpanContext(int(SPAN[3:35], 16), int(SPAN[36:52], 16), False, trace.TraceFlags(1))
    with reader_of(teacher, options=FULL_REQUESTS).set_sample_generator(samples(40)) as reader:
        with trace.use_span(trace.NonRecordingSpan(context)):
            epoch = reader()
            check(list(epoch), 40)
        check(list(reader()), 40)
    wait_until(lambda: sum(line["rows"] for line in access_lines(path)) >= 80)
    spans = [line["traceparent"] == SPAN for line in access_lines(path)]
    assert spans == [True] * (len(spans) // 2) + [False] * (len(spans) // 2)
