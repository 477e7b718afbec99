"""The dashboard's page in a real browser: what it shows of a state, to everybody, and what it makes of a bad one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from tests.plugins_chromium import Page
from tests.services.dashboard import states
from tests.services.dashboard.conftest import Look, publish

TEXT = "document.body.innerText"
KUBERNETES = "document.getElementById('kubernetes').innerText"

FOCUSED = """(({tagName, id, textContent}) => `${tagName} ${id || textContent.slice(0, 20)}`)(document.activeElement)"""

CONTRAST = """
(() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const parse = (text) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = ([r, g, b]) => {
        const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const back = (node) => {
        for (let each = node; each; each = each.parentElement) {
            const colour = parse(getComputedStyle(each).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return [255, 255, 255, 255];
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const poor = new Set();
    let count = 0;
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility({visibilityProperty: true})) continue;
        if (node.closest("noscript")) continue;
        count += 1;
        const both = [luminance(parse(getComputedStyle(node).color)), luminance(back(node))];
        const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        if (ratio < 4.5) poor.add(`${ratio.toFixed(2)} ${node.className || node.tagName}: ${walker.currentNode.data}`);
    }
    return {count, poor: [...poor]};
})()
"""


def test_everything_is_shown(look: Look) -> None:
    """Also to people who see little, no colours, or use no mouse."""
    unreadable = [{"key": "jobs/x/world", "reason": "no JSON"}]
    _, page = look(states.rich() | {"more_jobs": 12, "unreadable": unreadable, "stale": "the store does not answer"})
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
    rows = "document.querySelectorAll('#events tbody tr').length"
    cell = "document.querySelector('#events tbody td')"
    newest = page.evaluate("document.querySelector('#events tbody td:nth-child(5)').textContent")
    assert newest.startswith("students ask for 1,950"), "the newest event is not first"
    assert page.evaluate(f"{cell}.textContent").endswith("23:59:15")
    assert page.evaluate(f"{cell}.title").replace(",", "") == "Sunday 22 November 2026 at 23:59:15 UTC"
    assert page.evaluate("document.querySelector('#shards .card h3').textContent").startswith("imagenet-train")
    assert page.evaluate("document.querySelectorAll('canvas').length") == 6  # of two open jobs and a service
    _check_structure(page)
    legend = page.evaluate("document.querySelector('#jobs .legend').innerText")
    assert all(word in legend for word in states.CATEGORIES), "words stand beside colours"
    background = "getComputedStyle(document.body).backgroundColor"
    for dark in (False, True):
        before = page.evaluate(background)
        page.set_dark(dark)
        if dark:
            page.wait(f"{background} !== {before!r}")
        found = page.evaluate(CONTRAST)
        assert found["count"] > 200
        assert found["poor"] == [], "contrast is below that of WCAG AA"
    before = page.evaluate(rows)
    page.evaluate("document.getElementById('events-decisions').click()")
    assert 0 < page.evaluate(rows) < before
    page.evaluate("""{ const field = document.getElementById('events-filter');
        field.value = 'CHECKSUM 117'; field.dispatchEvent(new Event('input')); }""")
    assert page.evaluate(rows) == 1
    assert "wrong checksum" in page.evaluate("document.querySelector('#events tbody').textContent")


def _check_structure(page: Page) -> None:
    """Check what screen readers and keyboards find."""
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].filter(e => e.checkVisibility()).map(e => +e.tagName[1])"
    )
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "a level is left out"
    tables = page.evaluate("""[...document.querySelectorAll('table')].map(table => ({
        caption: table.caption?.textContent ?? '',
        columns: [...table.tHead.rows[0].cells].every(cell => cell.scope === 'col' && cell.textContent),
        rows: [...table.tBodies[0].rows].every(row => row.cells.length === table.tHead.rows[0].cells.length),
    }))""")
    assert len(tables) == 9
    assert all(each["caption"] and each["columns"] and each["rows"] for each in tables)
    unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    bare = (
        "[...document.querySelectorAll('.badge')].filter(e => e.checkVisibility() && e.textContent.length < 2).length"
    )
    assert page.evaluate(f"{unnamed} + {bare}") == 0
    # The connection, a store that is away, and a cluster that is.
    assert page.evaluate("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length") <= 3
    assert page.evaluate("document.documentElement.lang") == "en"
    for width in (1280, 375):
        page.resize(width, 800)
        tree = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = [node["role"]["value"] for node in tree if not node["ignored"]]
        assert roles.count("table") == len(tables) - 2  # a dataset has neither poisoned shards nor holders
        assert {"columnheader", "rowheader"} <= set(roles)
    page.resize(1280, 900)
    page.evaluate("document.body.focus()")
    reached = []
    for _ in range(15):
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(page.evaluate(FOCUSED))
    assert reached[0].startswith("A To the content")
    assert "INPUT events-filter" in reached


def test_cluster_is_shown(look: Look) -> None:
    state = states.kubernetes()
    server, page = look(state)
    page.evaluate("document.querySelectorAll('#kubernetes details').forEach((card) => { card.open = true; })")
    page.wait(f"{KUBERNETES}.includes({states.NO_GPU!r})")
    text = page.evaluate(KUBERNETES)
    for words in (
        "Namespace research", "3 of 4 workers ready · 62% · 2 workers not ready",
        "2\N{MULTIPLICATION SIGN} out of memory, memory",
        "out of memory, exit code 137 on node2: Killed", "next try in 25 s · node lost", "Insufficient nvidia.com/gpu",
        "~13 min", "1 to 8", "MinAboveMax", states.MIN_ABOVE_MAX, 'File "/edl/script/train.py", line 31',
        states.TRACE_END, "No operator has looked at it yet", "2 of 4 teachers ready", "NoIdleCapacity", "borrowed",
        "external", "3 older jobs",
    ):  # fmt: skip
        assert words in text, words
    sections = page.evaluate("document.getElementById('sections').innerText")
    assert sections.startswith("6 Kubernetes resources ▲ 2 failed")
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")
    state["kubernetes"]["stale"] = "as known last: https://10.0.0.1:6443: list elasticjobs: no answer"
    state["kubernetes"]["namespaces"] = ["research", "vision"]
    state["kubernetes"]["jobs"].append(states.workload("first", "Running") | {"namespace": "vision"})
    publish(server, page, state | {"time": states.NOW + 1}, "update")
    text = page.evaluate(KUBERNETES)
    assert all(words in text for words in ("no answer", "Namespaces research, vision", "vision/first"))
    assert page.evaluate("document.querySelectorAll('#kubernetes details').length") == 7, "what was known stays"
    state["kubernetes"] |= {"stale": "", "jobs": [], "pools": [], "more_jobs": 0}
    publish(server, page, state | {"time": states.NOW + 2}, "update")
    text = page.evaluate(KUBERNETES)
    assert "no answer" not in text
    assert "edl submit" in text


def test_hostile_names_are_text(look: Look) -> None:
    """And nothing is wider than the screen, whatever its width."""
    state, cluster = states.hostile(), states.kubernetes()["kubernetes"]
    for name in states.HOSTILE:
        members = [states.member(name, name, detail=name, failures={name: 1})]
        bad = states.workload(name, name, message=name, members=members)
        bad["conditions"].append({"type": "Failed", "status": "True", "reason": name, "message": name, "since": 1e300})
        cluster["jobs"].append(bad)
    cluster["pools"] += [None, 5, {"members": [None], "conditions": {}}]
    server, page = look(state | {"kubernetes": cluster})
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    page.wait(f"{KUBERNETES}.includes('onerror')")
    assert "owned" not in page.evaluate("document.title")
    assert page.evaluate("document.querySelectorAll('main img, main script, main a[href^=javascript]').length") == 0
    shown = page.evaluate("[...document.querySelectorAll('#jobs h3')].map(each => each.textContent)")
    written_out = [name.replace("\u202e", r"\u202e").replace("\x00", r"\u0000") for name in states.HOSTILE]
    assert sorted(shown) == sorted(name if name.strip() else "(no name)" for name in written_out)
    assert page.evaluate("document.querySelectorAll('#teachers h3').length") == len(states.HOSTILE)
    isolation = page.evaluate("[...document.querySelectorAll('.name')].map(each => getComputedStyle(each).unicodeBidi)")
    assert set(isolation) == {"isolate"}
    widest = "Math.max(...[...document.querySelectorAll('body *')].map(each => each.getBoundingClientRect().right))"
    for number, width in enumerate((320, 375, 768, 1280)):
        page.resize(width, 800)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        publish(server, page, states.rich(states.NOW + 1 + number))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(widest) <= width + 1


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


@pytest.mark.parametrize("first", [{}, None, STRANGE[-2]])
def test_missing_and_wrong_fields_survive(look: Look, first: Any) -> None:
    server, page = look(first)
    _is_drawn_plainly(page)
    for number, state in enumerate(STRANGE if first == {} else ()):
        publish(server, page, state | {"time": number + 1.0})
        _is_drawn_plainly(page)
    publish(server, page, states.rich(states.NOW + 1))
    assert "resnet50-imagenet" in page.evaluate(TEXT)


# Times of points, and how many lines they make.
GAPS: list[tuple[list[int] | range, int]] = [
    ([0, 600], 2), ([0, 600, 1200], 3), ([0, 1, 600], 2), ([0, 2], 1), ([0, 15, 30], 1),
    ([*range(0, 150, 15), *range(150, 190)], 1), ([*range(40), *range(45, 300, 15)], 1),
    ([*range(9), 600, *range(1200, 1209)], 3), ([*range(0, 90, 15), *range(900, 909)], 2),
    (range(0, 36000, 600), 1),
]  # fmt: skip


def test_empty_store_says_what_to_do(look: Look) -> None:
    """Then states with one thing each that is unlike the others."""
    server, page = look(states.EMPTY)
    text = page.evaluate(TEXT)
    for words in ("Nothing runs here yet", "edl run ", "edl serve ", "edl master ", "edl demo --dashboard"):
        assert words in text, words
    assert states.EMPTY["store"] in text
    shown = "[...document.querySelectorAll('main > section:not([hidden])')].map(each => each.id)"
    assert page.evaluate(shown) == ["empty"]
    for times, count in GAPS:
        points = [{"t": t, "v": 1} for t in times]
        column = page.evaluate(
            f"import('./static/series.js').then(({{lines}}) => lines({points}, [(point) => point.v]).columns[0])"
        )
        assert column.count(None) == count - 1, times
    alone = states.job("labels") | {"master_only": True, "nodes": [], "events": [], "samples_per_s": None}
    alone["steps_per_s"] = 0.0
    alone["history"] = [{"t": states.NOW + t, "seconds": {}, "units_per_s": 0.0, "steps_per_s": 0.0} for t in range(3)]
    alone["master"] |= {"state": "silent", "age_s": 75.0}
    publish(server, page, states.EMPTY | {"jobs": [alone], "time": states.NOW + 1})
    text = page.evaluate(TEXT)
    for words in (
        "no worker's agent is known",
        "2 poisoned shards",
        "reported nothing for 75 s",
        "Throughput, units/s",
    ):
        assert words in text, words
    assert "Throughput, samples/s" not in text
    assert "Members" not in text
    state = states.rich(states.NOW + 2)
    state["services"][0]["wanted"]["time"] = states.NOW - 300
    state["services"][0]["teachers"][0]["state"] = "lapsed"
    publish(server, page, state)
    assert "no master decides at present" in page.evaluate("document.querySelector('#teachers .wanted').textContent")
    assert "3 teachers live · 1 lapsed" in page.evaluate(TEXT)
    assert "3 teachers" in page.evaluate("document.querySelector('nav').innerText")
    student = {"id": "r", "job": "", "teachers": ["t1", "t2"]}
    service = {"service": "other", "teachers": [], "students": [student], "history": []}
    publish(server, page, states.EMPTY | {"services": [service], "time": states.NOW + 3})
    assert page.evaluate("document.querySelector('.names').textContent") == "t1, t2", "names are apart when copied"


def test_everything_is_bounded(look: Look) -> None:
    """As much as a hostile store may have: the page shows the first of each, and all on request."""
    state = states.huge()
    dataset = copy.deepcopy(state["jobs"][0]["master"]["datasets"][0])
    dataset["poisoned"][0]["failures"] *= 300
    state["jobs"][0]["master"]["datasets"] = [dataset | {"name": f"dataset {number}"} for number in range(60)]
    state["services"] += [states.service(f"service {number}") for number in range(30)]
    server, page = look(state)
    rows = "document.querySelectorAll('#teachers table')[0].tBodies[0].rows.length"
    events = "document.querySelectorAll('#events tbody tr').length"
    assert (page.evaluate(events), page.evaluate(rows)) == (30, 20)
    for part in ("#jobs details", "#shards article", "#teachers article"):
        assert page.evaluate(f"document.querySelectorAll('{part}').length") == 20
    text = page.evaluate(TEXT)
    for words in ("Show all 31 services", "Show all 200 teachers", "and 895 earlier failures"):
        assert words in text, words
    page.evaluate("document.querySelectorAll('#teachers button.more, #events button.more').forEach(e => e.click())")
    assert (page.evaluate(events), page.evaluate(rows)) == (1000, 200)
    publish(server, page, state | {"time": states.NOW + 1})
    assert page.evaluate(rows) == 200, "an update folds it again"
