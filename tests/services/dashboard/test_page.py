"""The dashboard's page in a real browser: what it shows of a state."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.plugins_chromium import Page
from tests.services.dashboard import states
from tests.services.dashboard.conftest import Look, publish

pytestmark = pytest.mark.chromium
TEXT = "document.body.innerText"


def test_empty_store_says_what_to_do(look: Look) -> None:
    _, page = look(states.EMPTY)
    text = page.evaluate(TEXT)
    for words in (
        "Nothing runs here yet",
        "edl run ",
        "edl serve ",
        "edl master ",
        "edl demo --dashboard",
        states.EMPTY["store"],
    ):
        assert words in text, words
    assert page.evaluate("[...document.querySelectorAll('main > section:not([hidden])')].map(each => each.id)") == [
        "empty"
    ]


def test_everything_is_shown(look: Look) -> None:
    unreadable = [{"key": "jobs/x/world", "reason": "no JSON"}]
    _, page = look(states.rich() | {"more_jobs": 12, "unreadable": unreadable})
    text = page.evaluate(TEXT)
    for words in (
        "resnet50-imagenet", "running", "goodput", "83.7%", "927", "samples/s", "3 nodes there, 1 gone", "▲lost",
        "train", "rollback", "rendezvous", "4 workers wanted", "a fourth worker gains 24%",
        "2 poisoned shards", "part-0117.parquet: page 4 has a wrong checksum", "node-b.cluster.example/1",
        "lease of node-a.cluster.example/0 expired", "imagenet-train", "611 shards", "epoch 1 of 2",
        "teacher-4", "draining", "sha256:4be1b7c2", "5 teachers wanted", "demand is above 90% for 15 s", "31.0%",
        "signal 9 from outside", "Xid 79", "edl run --readmit", "4 teachers live", "12 older jobs",
        "1 record of the store could not be read",
    ):  # fmt: skip
        assert words in text, words
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")
    order = page.evaluate(
        "[...document.querySelectorAll('#events tbody td:nth-child(5)')].map(cell => cell.textContent)"
    )
    assert order[0].startswith("students ask for 1,950"), "the newest event is not first"
    assert page.evaluate("document.querySelector('#shards .card h3').textContent").startswith("imagenet-train")
    assert page.evaluate("document.querySelectorAll('canvas').length") == 6  # of two open jobs and a service


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_nothing_is_wider_than_the_screen(look: Look, width: int) -> None:
    server, page = look(states.rich(), width, 800)
    widest = "Math.max(...[...document.querySelectorAll('body *')].map(each => each.getBoundingClientRect().right))"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(widest) <= width + 1
    publish(server, page, states.hostile(states.NOW + 1))
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_are_text(look: Look) -> None:
    _, page = look(states.hostile())
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    page.evaluate("new Promise(requestAnimationFrame)")
    assert "owned" not in page.evaluate("document.title")
    assert page.evaluate("document.querySelectorAll('main img, main script, main a[href^=javascript]').length") == 0
    shown = page.evaluate("[...document.querySelectorAll('#jobs h3')].map(each => each.textContent)")
    written_out = [name.replace("\u202e", r"\u202e").replace("\x00", r"\u0000") for name in states.HOSTILE]
    assert sorted(shown) == sorted(name if name.strip() else "(no name)" for name in written_out)
    assert page.evaluate("document.querySelectorAll('#teachers h3').length") == len(states.HOSTILE)
    isolation = page.evaluate("[...document.querySelectorAll('.name')].map(each => getComputedStyle(each).unicodeBidi)")
    assert set(isolation) == {"isolate"}


STRANGE: list[dict[str, Any]] = [
    {}, {"jobs": None, "services": 7, "events": "x"}, {"jobs": [None, 3, [], {}], "services": [{}], "events": [{}]},
    {"time": "soon", "jobs": [{"job": 1, "seconds": [], "nodes": {}, "history": [{"t": None}, {"t": 5}]}]},
    {"jobs": [{"state": None, "master": {"datasets": [{"shards": None, "poisoned": [{"failures": [None]}]}]}}]},
    {"jobs": [{"job": "a"}, {"job": "a"}], "services": [{"service": "s", "teachers": [{}, {}], "students": [{}, {}]}]},
    {"time": 1e300, "jobs": [{"job": "a", "began": -1e300, "elapsed_s": 1e300, "step": -1e300, "goodput": -5}]},
    {"jobs": [{"job": "a", "seconds": {"train": -1, "new": 5, "down": "x"},
               "history": [{"t": t, "seconds": {"train": train}} for t, train in ((3, 3), (2, 1), (4, 1), (9, 1))]}]},
    {"jobs": [{"job": "a", "history": [{"t": t, "steps_per_s": 1e308, "seconds": {"a": 9e307}} for t in (0, 1e300)]}],
     "services": [{"service": "s", "history": [{"t": t, "rows_per_s": -1e308} for t in (-1e11, 0, 99999999999)]}]},
    {"events": [{"time": None, "kind": None}, {"time": 1e18, "kind": 5, "text": ["a"], "cause": {"b": 1}}]},
]  # fmt: skip


def _is_drawn_plainly(page: Page) -> None:
    """What is missing is a dash; the page says nothing of NaN."""
    text = page.evaluate(TEXT)
    for word in ("NaN", "undefined", "null", "Infinity", "∞", "[object"):
        assert word not in text, text


def test_missing_and_wrong_fields_survive(look: Look) -> None:
    server, page = look(states.rich())
    for number, state in enumerate(STRANGE):
        publish(server, page, state | {"time": number + 1.0})
        _is_drawn_plainly(page)
    publish(server, page, states.rich(states.NOW + 1))
    assert "resnet50-imagenet" in page.evaluate(TEXT)


@pytest.mark.parametrize("state", [{}, [], None, 3, STRANGE[-2]])
def test_strange_first_state_is_drawn(look: Look, state: Any) -> None:
    server, page = look(state)
    _is_drawn_plainly(page)
    publish(server, page, states.rich(states.NOW + 1))
    assert "resnet50-imagenet" in page.evaluate(TEXT)


# Times of points, and how many lines they make.
@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([0, 600], 2), ([0, 600, 1200], 3), ([0, 1, 600], 2), ([0, 2], 1), ([0, 15, 30], 1),
        ([*range(0, 150, 15), *range(150, 190)], 1), ([*range(40), *range(45, 300, 15)], 1),
        ([*range(9), 600, *range(1200, 1209)], 3), ([*range(0, 90, 15), *range(900, 909)], 2),
        (range(0, 36000, 600), 1),
    ],
)  # fmt: skip
def test_gaps_go_by_their_neighbours(look: Look, times: list[int], count: int) -> None:
    _, page = look(states.EMPTY)
    points = [{"t": t, "v": 1} for t in times]
    column = page.evaluate(
        f"import('./static/series.js').then(({{lines}}) => lines({points}, [(point) => point.v]).columns[0])"
    )
    assert column.count(None) == count - 1


def test_master_alone_is_measured_in_units(look: Look) -> None:
    """Its job has no steps and no samples of which to speak, whether or not it moves."""
    (job, *_) = states.rich()["jobs"]
    job |= {"job": "labels", "master_only": True, "samples_per_s": None, "steps_per_s": 0.0}
    job["history"] = [{"t": states.NOW + t, "seconds": {}, "units_per_s": 0.0, "steps_per_s": 0.0} for t in range(3)]
    _, page = look(states.EMPTY | {"jobs": [job]})
    text = page.evaluate(TEXT)
    assert "Throughput, units/s" in text
    assert "Throughput, samples/s" not in text


def test_names_are_apart_when_copied(look: Look) -> None:
    student = {"id": "r", "job": "", "teachers": ["t1", "t2"]}
    service = {"service": "s", "teachers": [], "students": [student], "history": []}
    _, page = look(states.EMPTY | {"services": [service]})
    assert page.evaluate("document.querySelector('.names').textContent") == "t1, t2"


def test_huge_state_stays_quick(look: Look) -> None:
    server, page = look(states.huge())
    assert page.evaluate("document.querySelectorAll('#events tbody tr').length") == 30
    assert page.evaluate("document.querySelectorAll('#teachers table')[0].tBodies[0].rows.length") == 20
    assert page.evaluate("document.querySelectorAll('#jobs details').length") == 20
    page.evaluate("document.querySelectorAll('button.more:not([hidden])').forEach(each => each.click())")
    assert page.evaluate("document.querySelectorAll('#events tbody tr').length") == 1000
    assert page.evaluate("document.querySelectorAll('#teachers table')[0].tBodies[0].rows.length") == 200
    page.evaluate("""
        window.longest = 0;
        new PerformanceObserver(list => {
            for (const entry of list.getEntries()) longest = Math.max(longest, entry.duration);
        }).observe({type: "longtask"});
    """)
    for second in range(1, 4):
        publish(server, page, states.huge() | {"time": states.NOW + second})
    assert page.evaluate("longest") < 3000, "a person would take the page for frozen"


def test_all_is_shown_on_request(look: Look) -> None:
    state = copy.deepcopy(states.rich())
    state["services"] = [states.service("digits", 25)]
    server, page = look(state)
    rows = "document.querySelectorAll('#teachers table')[0].tBodies[0].rows.length"
    button = "[...document.querySelectorAll('#teachers button.more')].find(each => each.checkVisibility())"
    assert page.evaluate(rows) == 20
    assert page.evaluate(f"{button}.textContent") == "Show all 25 teachers"
    page.evaluate(f"{button}.click()")
    assert page.evaluate(rows) == 25
    publish(server, page, state | {"time": states.NOW + 1})
    assert page.evaluate(rows) == 25, "an update folds it again"


def test_events_can_be_filtered(look: Look) -> None:
    _, page = look(states.rich())
    rows = "document.querySelectorAll('#events tbody tr').length"
    before = page.evaluate(rows)
    page.evaluate("document.getElementById('events-decisions').click()")
    assert 0 < page.evaluate(rows) < before
    page.evaluate("""{ const field = document.getElementById('events-filter');
        field.value = 'CHECKSUM 117'; field.dispatchEvent(new Event('input')); }""")
    assert page.evaluate(rows) == 1
    assert "wrong checksum" in page.evaluate("document.querySelector('#events tbody').textContent")


def test_times_are_local_and_full(look: Look) -> None:
    _, page = look(states.rich())
    cell = "document.querySelector('#events tbody td')"
    assert page.evaluate(f"{cell}.textContent") == "23:59:15" or page.evaluate(f"{cell}.textContent").endswith(
        "23:59:15"
    )
    assert page.evaluate(f"{cell}.title").replace(",", "") == "Sunday 22 November 2026 at 23:59:15 UTC"


def test_job_of_a_master_alone(look: Look) -> None:
    """`edl master` without `edl run`: shards, and no members, of whom nothing is known."""
    state = states.EMPTY | {"jobs": [states.job() | {"master_only": True, "nodes": [], "history": [], "events": []}]}
    state["jobs"][0]["master"] |= {"state": "silent", "age_s": 75.0}
    _, page = look(state)
    text = page.evaluate(TEXT)
    assert "no worker's agent is known" in text
    assert "2 poisoned shards" in text
    assert "reported nothing for 75 s" in text
    assert "Members" not in text
    assert page.evaluate("[...document.querySelectorAll('canvas')].filter(each => each.checkVisibility()).length") == 0


def test_old_wanted_count_says_so(look: Look) -> None:
    state = states.rich()
    state["services"][0]["wanted"]["time"] = states.NOW - 300
    _, page = look(state)
    assert "no master decides at present" in page.evaluate("document.querySelector('#teachers .wanted').textContent")


def test_lapsed_teachers_do_not_count(look: Look) -> None:
    state = states.rich()
    state["services"][0]["teachers"][0]["state"] = "lapsed"
    _, page = look(state)
    assert "3 teachers live · 1 lapsed" in page.evaluate(TEXT)
    assert "3 teachers" in page.evaluate("document.querySelector('nav').innerText")


def test_everything_is_bounded(look: Look) -> None:
    """As much as a hostile store may have: the page shows the first of each, and how many there are."""
    state = states.rich()
    dataset = copy.deepcopy(state["jobs"][0]["master"]["datasets"][0])
    dataset["poisoned"][0]["failures"] *= 300
    state["jobs"][0]["master"]["datasets"] = [dataset | {"name": f"dataset {number}"} for number in range(60)]
    state["services"] = [states.service(f"service {number}") for number in range(60)]
    _, page = look(state)
    assert page.evaluate("document.querySelectorAll('#shards article').length") == 20
    assert page.evaluate("document.querySelectorAll('#teachers article').length") == 20
    text = page.evaluate(TEXT)
    for words in ("Show all 60 datasets", "Show all 60 services", "and 895 earlier failures"):
        assert words in text, words
