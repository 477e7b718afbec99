"""What the page shows: jobs and their history, masters, services, a cluster, and the metrics of them."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.cli import main, servers
from edl.collective.goodput import Event, NodeRecord, ProgressMark, encode_events, summarize
from edl.collective.job_records import GAVE_UP, JobState
from edl.dashboard.metrics import METRICS, DashboardMetrics
from edl.dashboard.server import DEFAULT_PORT
from edl.dashboard.state import jobs, schema
from edl.dashboard.state import reader as state_reader
from edl.dashboard.state.cluster import ClusterView
from edl.dashboard.state.history import History, StoreSampler
from edl.dashboard.state.services import ServiceReader, find_changes
from edl.discovery import Instance, Registry, Snapshot, Store
from edl.discovery.served.server import SeriesRings
from edl.discovery.served.store import DEFAULT_PORT as STORE_PORT
from edl.discovery.served.store import points_of
from edl.discovery.sqlite import SqliteStore
from edl.errors import DiscoveryError
from edl.kube.settings import KubeSettings
from edl.settings import Credentials
from tests.fast.dashboard.server import now_s, put_job, put_teacher
from tests.fast.kube.conftest import write_kubeconfig
from tests.fast.kube.server import ApiServer, Reply, Request


def test_only_changes_are_decoded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_job(store, "first", "ab")
    put_job(store, "ended", "c", state=JobState.DONE)
    decoded: list[str] = []
    summed_up: list[str] = []
    decode, sum_up = jobs.decode_part, jobs.summarize
    monkeypatch.setattr(jobs, "decode_part", lambda key, value: (decoded.append(key), decode(key, value))[1])
    monkeypatch.setattr(jobs, "summarize", lambda job, *rest: (summed_up.append(job), sum_up(job, *rest))[1])
    reader = jobs.JobReader(store)
    now = now_s()
    summaries, _, _ = reader.read(now)
    assert (len(decoded), sorted(summed_up)) == (7, ["ended", "first"])
    again, _, _ = reader.read(now + 10)
    assert (len(decoded), sorted(summed_up)) == (7, ["ended", "first", "first"]), "an ended job is summed up again"
    assert again["ended"].nodes[0].silent_s == pytest.approx(summaries["ended"].nodes[0].silent_s + 10, abs=0.1)
    fresh, _, _ = jobs.JobReader(store).read(now + 10)
    assert again == fresh, "what is kept differs from what is read"
    decoded.clear()
    put_job(store, "ended", "d")  # a new job of the same name
    restarted, _, _ = reader.read(now_s())
    assert (len(decoded), restarted["ended"].state) == (3, "running")


def test_given_up_job_can_be_forgotten(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A job is given up when its last node says so, or was not seen for a day."""
    put_job(store, "silent")
    put_job(store, "resnet", state=JobState.FORMING)
    event = Event(now_s(), "a", "leave", f"{GAVE_UP}: only 1 node of at least 2 came")
    store.put("jobs/resnet/events/z", encode_events([event]))
    reader = jobs.JobReader(store)
    for later_s, states in ((120, {"down", GAVE_UP}), (90_000, {GAVE_UP})):
        summaries, _, _ = reader.read(now_s() + later_s)
        assert {one.state for one in summaries.values()} == states
    store.put("jobs/resnet/nodes/a", b"")
    assert main(["status", "resnet", "--forget", "--store", url]) == 2
    assert "its agents are running" in capsys.readouterr().err
    store.delete("jobs/resnet/nodes/a")
    assert main(["status", "resnet", "--forget", "--store", url]) == 0
    assert list(reader.read(now_s())[0]) == ["silent"]


def test_causes_of_generations() -> None:
    events = (
        Event(1, "a", "kill", "rank 1 got SIGKILL", 3),
        Event(2, "a", "generation", "lost b", 4),
        Event(3, "a", "restart", "rank 0 ended with exit code 1", 4),
        Event(4, "a", "generation", "rank 0 ended with exit code 1", 5),
        Event(5, "a", "join", "ready"),
    )
    assert [event.cause for event in summarize("j", [events], 0).events] == [
        "",
        "lost b (kill at a: rank 1 got SIGKILL)",
        "rank 0 ended with exit code 1",
        "rank 0 ended with exit code 1",
        "",
    ]


@dataclass(frozen=True)
class Point:
    t: float


@settings(max_examples=40)
@given(st.integers(4, 50), st.lists(st.floats(0, 1e6), max_size=300))
def test_any_points_stay_in_order(limit: int, times: list[float]) -> None:
    history: History[Point] = History(limit)
    history.extend(map(Point, times))
    kept = [point.t for point in history.points]
    assert kept == sorted(set(kept))
    assert len(kept) <= limit
    if times:
        assert kept[-1] == max(kept)
        assert kept[0] == times[0], "the beginning is kept"


def test_new_page_has_the_last_hours(store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store's process recorded comes before the page's own points; nothing of a job before or the future."""
    put_job(store, "resnet")
    put_teacher(store)
    sampler, now = StoreSampler(), now_s()
    times = iter([now - 900, now - 30, now - 5, now + 500])
    rings = SeriesRings(lambda: next(times))
    for _ in range(4):
        rings.record(sampler(store))
    monkeypatch.setattr(SqliteStore, "series", lambda self: map(points_of, rings.replies()))
    with closing(state_reader.StateReader(url)) as reader:
        state = reader.read()
    ((job,), (service,)) = state.jobs, state.services
    assert [round(point.t - now) for point in job.history] == [-59, -30, -5, 0]
    assert [point.samples_per_s for point in job.history[1:]] == [96.0] * 3
    assert job.history[1].seconds == pytest.approx(job.history[3].seconds, abs=1)
    assert [round(point.t - now) for point in service.history] == [-900, -30, -5, 0]
    assert {(point.rows_per_s, point.teachers, point.wanted) for point in service.history} == {(100.0, 1, None)}


def test_json_has_no_nan_and_no_looks() -> None:
    point = schema.JobPoint(1.0, {"train": float("inf")}, float("nan"), look=3)
    assert schema.as_json(point) == {"t": 1.0, "seconds": {"train": None}, "goodput": None}
    assert schema.as_json([point], 3) == []
    assert schema.as_json([point], 2) == [schema.as_json(point)]


def test_store_is_shown_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def open_store(url: str, *, timeout_s: float, credentials: Credentials | None) -> None:
        shown.append(credentials)
        raise DiscoveryError("away")

    monkeypatch.setattr(state_reader, "open_store", open_store)
    credentials = Credentials(ca="ca.pem")
    with closing(state_reader.StateReader("edl://store.example:1", credentials=credentials)) as reader:
        assert "away" in reader.read().stale
    assert shown == [credentials]


@pytest.mark.parametrize(("state", "cause"), [("draining", "drained"), ("ready", "ended"), ("starting", "killed")])
def test_teacher_that_left_has_a_cause(state: str, cause: str) -> None:
    before = schema.ServiceStatus("s", (schema.TeacherStatus("t", "", "", "", state),), ())
    (event,) = find_changes([before], [], 5.0)
    assert (event.kind, cause in event.cause) == ("leave", True)


def test_lapsed_teacher_has_no_rate(registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance("s", "t1", "127.0.0.1", 1)
    put_teacher(store, service="s")
    for live in (True, False):
        found = {"instances": (instance,)} if live else {"lapsed": (instance,)}
        monkeypatch.setattr(registry, "services", lambda: ["s"])
        snapshot = Snapshot("s", **{"instances": (), "lapsed": (), **found})  # type: ignore[arg-type]
        monkeypatch.setattr(registry, "snapshot", lambda name, snapshot=snapshot: snapshot)
        ((service,), _, _) = ServiceReader(store, registry).read(NOW)
        (status,) = service.teachers
        assert (status.state, status.rows_per_s) == (("ready", 100.0) if live else ("lapsed", None))
        assert (status.compute_share is None, status.queue_rows) == ((False, 3) if live else (True, None))


NOW = 1_000_000.0


def put_reader(store: Store, reader: str, rows: int) -> None:
    times = [{"t": t, "rows_asked": rows * t // 10, "wait_s": 0.0, "source_wait_s": 0.0} for t in (10, 5)]
    record = {"v": 1, "id": reader, "job": "j", "host": "h", "teachers": ["t"], **times[0], "since": times[1]}
    store.put(f"load/s/students/{reader}", json.dumps(record).encode())


def test_process_is_one_student(registry: Registry, store: Store) -> None:
    """Also readers that a student makes anew in each epoch; what it asked for never falls."""
    reader = ServiceReader(store, registry)

    def look(now_s: float) -> list[tuple[str, float, float]]:
        services, _, _ = reader.read(now_s)
        return [(student.id, student.rows_asked, student.rows_per_s) for one in services for student in one.students]

    put_reader(store, "h-7-0000aaaa", 100)
    assert look(0.0) == [("h-7", 100, 10)]
    store.delete("load/s/students/h-7-0000aaaa")
    assert look(2.0) == [("h-7", 100, 0)], "between two epochs it is still there"
    put_reader(store, "h-7-0000bbbb", 50)
    put_reader(store, "h-8-0000cccc", 10)
    assert look(4.0) == [("h-7", 150, 5), ("h-8", 10, 1)]
    store.delete("load/s/students/h-7-0000bbbb")
    assert look(10.0)[0] == ("h-7", 150, 0)
    assert look(30.0) == [("h-8", 10, 1)]


def _exported(*found: schema.JobStatus, wanted: schema.WantedCount | None = None) -> dict[str, float]:
    state = schema.DashboardState(NOW, "", "", jobs=found, services=(schema.ServiceStatus("s", (), (), wanted),))
    return {
        sample.name: sample.value for family in DashboardMetrics(lambda: state).collect() for sample in family.samples
    }


@pytest.mark.parametrize("age_s", [5.0, 61.0])
def test_old_wanted_count_is_left_out(age_s: float) -> None:
    wanted = schema.WantedCount(4, 2, "", NOW - 900, NOW - age_s)
    job = jobs.job_status("j", None, None, wanted, 5)
    exported = _exported(job, wanted=wanted)
    for name in ("edl_pool_wanted_replicas", "edl_job_wanted_workers"):
        assert exported.get(name) == (4 if age_s < 60 else None)
    assert "edl_job_wanted_workers" not in _exported(dataclasses.replace(job, state="done"))


@pytest.mark.parametrize("samples", [0, 640])
def test_unknown_samples_are_no_zero(samples: int) -> None:
    """A job that is killed does 0 samples a second; one that never told of any does an unknown number."""
    node = NodeRecord("a", 0, 1, marks=(ProgressMark(1, 9, samples),), step=9)
    job = jobs.job_status("j", summarize("j", [node], 1_000_000_000), None, None, 5)
    fields = schema.as_json(job)
    expected = 0.0 if samples else None
    assert (fields["samples_per_s"], fields["nodes"][0]["samples_per_s"]) == (expected, expected)
    exported = _exported(job)
    assert exported.get("edl_job_samples_per_second") == expected
    assert exported["edl_job_steps_per_second"] == 0


def test_metrics_and_port_are_those_of_docs() -> None:
    text = (Path(__file__).parents[3] / "docs/dashboard.md").read_text()
    assert servers._PAGE_PORT == DEFAULT_PORT
    assert servers._STORE_PORT == STORE_PORT
    assert f"localhost:{DEFAULT_PORT}" in text
    rows = re.findall(r"^\| `(edl_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    table = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    known = {spec.name: (spec.kind, spec.labels, spec.text) for spec in METRICS}
    assert len(table) >= 12
    assert table.items() <= known.items()


@pytest.fixture
def server(stack: ExitStack) -> ApiServer:
    pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")
    server = stack.enter_context(closing(ApiServer()))

    def answer(request: Request) -> Reply:
        place = request.path.split("/namespaces/")[1].split("/")[0]
        job = {"metadata": {"name": "same", "namespace": place, "uid": place}, "spec": {}, "status": {}}
        items = [job] if "/elasticjobs" in request.path else []
        return Reply(200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})

    server.answer = answer
    return server


@pytest.mark.parametrize(
    ("named", "shown"),
    [((), ["own"]), (("",), ["own"]), (("red", "blue", "red"), ["red", "blue"]), (("red", ""), ["red", "own"])],
)
def test_jobs_of_each_namespace(
    server: ApiServer, stack: ExitStack, tmp_path: Path, named: tuple[str, ...], shown: list[str]
) -> None:
    settings = KubeSettings(write_kubeconfig(tmp_path / "config", server.url, namespace="own"))
    view = stack.enter_context(closing(ClusterView(settings, named)))
    found = view.latest()
    assert found.stale == ""
    assert list(found.namespaces) == shown
    assert sorted(job.namespace for job in found.jobs) == sorted(shown)
    assert len(server.requests) == 3 * len(shown), "a list each of jobs, pools and pods"
