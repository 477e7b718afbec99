"""The dashboard's page in a real browser: what it shows, to everybody, and how it follows updates."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Store
from edl.settings import Credentials
from tests.fast.dashboard.server import put_wanted
from tests.plugins_chromium import Browser, Page
from tests.plugins_consul import free_ports
from tests.services.dashboard import states
from tests.services.dashboard.page_server import PageServer
from tests.waiting import wait_until

DRAWN = "document.getElementById('content').dataset.time"
TEXT = "document.body.innerText"
KUBERNETES = "document.getElementById('kubernetes').innerText"
STATUS = "(document.querySelector('.connection')?.innerText ?? '')"
IS_LIVE = "document.documentElement.dataset.connection === 'live'"
LIVE = f"{IS_LIVE} && {STATUS}.includes('live')"
TOKEN = "0123456789abcdef0123456789abcdef"

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

Look = Callable[..., tuple[PageServer, Page]]


@pytest.fixture
def look(browser: Browser, stack: contextlib.ExitStack) -> Look:
    """Serve a state, and open the page on it; afterwards the browser must have had nothing to complain of."""

    def open_page(state: Any, port: int = 0) -> tuple[PageServer, Page]:
        server = PageServer(state, port)
        stack.callback(server.close)
        page = browser.open(server.url)
        stack.callback(_end, page, server.url)
        page.wait(DRAWN)
        return server, page

    return open_page


def _end(page: Page, url: str) -> None:
    """Close a page that has had nothing amiss; a test that refuses streams or goes away has the browser say so."""
    page.evaluate("1")  # what it said before has been read then
    page.close()
    assert [each for each in page.troubles if not each.startswith("network: Failed to load resource")] == []
    assert {asked for asked in page.requests if not asked.startswith(url)} <= {"about:blank"}


def publish(server: PageServer, page: Page, state: dict[str, Any], kind: str = "state") -> None:
    """Send a state, and wait until the page has drawn it."""
    server.publish(state, kind)
    page.wait(f"{DRAWN} === String({state['time']!r})")


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
    assert "run-01234567" in text
    assert "run-012345678" not in text, "a name that edl run made takes the place of what matters"
    page.resize(1400, 900)
    height = "[...document.querySelectorAll('#events .badge')].map((badge) => badge.getClientRects().length)"
    assert page.evaluate(f"Math.max(...{height}.slice(0, 100))") == 1, "a word of EDL's own does not fit its column"
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
        states.TRACE_END, "No operator has handled it yet", "2 of 4 teachers ready", "NoIdleCapacity", "borrowed",
        "external", "3 older jobs",
    ):  # fmt: skip
        assert words in text, words
    page.resize(1000, 900)
    names = "[...document.querySelectorAll('#kubernetes td .name, #kubernetes tbody th .name')]"
    broken = f"{names}.filter((name) => name.textContent.length < 12 && name.getClientRects().length > 1)"
    assert page.evaluate(f"{broken}.map((name) => name.textContent)") == []
    sections = page.evaluate("document.getElementById('sections').innerText")
    assert sections.startswith("6 Kubernetes resources ▲ 2 failed")
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")
    state["kubernetes"]["stale"] = "last known state: https://10.0.0.1:6443: list elasticjobs: no answer"
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
    server, page = look(states.hostile())
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


def test_missing_and_wrong_fields_survive(look: Look) -> None:
    for first in (None, STRANGE[-2], {}):
        server, page = look(first)
        _is_drawn_plainly(page)
    for number, state in enumerate(STRANGE):
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
    """Then a job comes and goes, whose history grows, and states with one thing each that is unlike the others."""
    server, page = look(states.EMPTY)
    text = page.evaluate(TEXT)
    for words in ("Nothing is running here yet", "edl run ", "edl serve ", "edl master ", "edl demo --dashboard"):
        assert words in text, words
    assert states.EMPTY["store"] in text
    shown = "[...document.querySelectorAll('main > section:not([hidden])')].map(each => each.id)"
    assert page.evaluate(shown) == ["empty"]
    state = states.EMPTY | {"jobs": [states.job(points=50)], "time": states.NOW + 0.1}
    publish(server, page, state)
    assert "empty" not in page.evaluate(shown)
    label = "document.querySelector('#jobs .slot:last-child .canvas').getAttribute('aria-label')"
    assert "from 22 Nov, 23:58" in page.evaluate(label)
    newest = state["jobs"][0]["history"][-1] | {"t": states.NOW + 0.2, "samples_per_s": 4321.0}
    newer = state | {"jobs": [state["jobs"][0] | {"history": [newest]}], "time": states.NOW + 0.2}
    publish(server, page, newer, "update")
    assert "now 4,321 samples/s" in page.evaluate(label)
    assert "from 22 Nov, 23:58" in page.evaluate(label), "the points before are gone"
    publish(server, page, states.EMPTY | {"time": states.NOW + 0.3})
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
        "no agent has reported",
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
    """The page shows the first of each, and all on request."""
    state = states.huge()
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


def halve(value: Any) -> Any:
    """Return a state with other figures at the same times."""
    if isinstance(value, dict):
        return {name: halve(each) for name, each in value.items()}
    if isinstance(value, list):
        return [halve(each) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 1e9:
        return type(value)(value / 2)
    return value


def test_every_figure_follows_updates(look: Look) -> None:
    """What is on the page after an update is what a page shows that is opened then."""
    server, page = look(states.rich())
    later = halve(states.rich(states.NOW + 3600))
    for teacher in later["services"][0]["teachers"]:
        teacher |= {"state": "lapsed", "version": "v2", "students": []}
    for student in later["services"][0]["students"]:
        student |= {"teachers": ["teacher-4"], "job": "another"}
    for node in later["jobs"][0]["nodes"]:
        node |= {"state": "idle", "ranks": [5]}
    publish(server, page, later)
    _, fresh = look(later)
    shown = "document.getElementById('content').innerText"
    assert page.evaluate(shown) == fresh.evaluate(shown)
    bars = "[...document.querySelectorAll('.part')].map(each => each.className + each.style.flexGrow + each.hidden)"
    assert page.evaluate(bars) == fresh.evaluate(bars)
    named = "[...document.querySelectorAll('[aria-label], [title]')].map(each => each.ariaLabel + each.title)"
    assert page.evaluate(named) == fresh.evaluate(named)


def test_update_keeps_what_a_reader_did(look: Look) -> None:
    """Open details, focus, a selection and the place on the page survive updates; nothing jumps."""
    server, page = look(states.rich())
    page.evaluate("[...document.querySelectorAll('#jobs details')].at(-1).open = true")
    page.evaluate("document.getElementById('events-filter').focus(); scrollTo(0, 900)")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#shards h3'))")
    places = "[...document.querySelectorAll('h2, h3, h4, table, canvas')].map(each => each.getBoundingClientRect().top)"
    seen: list[object] = []

    def is_at_rest() -> bool:
        seen.append(page.evaluate(f"new Promise(done => requestAnimationFrame(() => done({places})))"))
        return len(seen) > 5 and seen[-1] == seen[-5]

    wait_until(is_at_rest, "a page at rest")
    for second in (1, 2):
        publish(server, page, states.rich(states.NOW) | {"time": states.NOW + second})
    assert page.evaluate(places) == seen[-1]
    assert page.evaluate("document.activeElement.id") == "events-filter"
    assert page.evaluate("getSelection().toString()").startswith("imagenet-train")
    assert page.evaluate("[...document.querySelectorAll('#jobs details')].at(-1).open")


def test_lost_connection_is_said_and_mended(look: Look) -> None:
    """The server ends the stream, refuses it, sends garbage and goes away, and another comes to its port."""
    server, page = look(states.rich(), port=free_ports(1)[0])  # which no connection is given meanwhile
    page.wait(LIVE)
    publish(server, page, states.rich(states.NOW + 1))
    server.drop()
    wait_until(lambda: len(server.seen_ids) > 1, "another stream")
    assert server.seen_ids[-1] == "1", "it names the last event"
    page.wait(LIVE)
    server.refuse = 500  # EventSource gives up after an HTTP error; the page does not, and says which it was
    server.drop()
    page.wait(f"{STATUS}.includes('the server answers 500')")
    server.refuse = 0
    page.wait(LIVE)
    streams = len(server.seen_ids)
    server.publish('{"time": NaN')
    wait_until(lambda: len(server.seen_ids) > streams, "another stream after garbage")
    page.wait(LIVE)
    server.close()
    page.wait(f"{STATUS}.includes('connection lost')")
    assert "last update" in page.wait(f"{STATUS}.includes('trying again') && {STATUS}")
    assert "resnet50-imagenet" in page.evaluate(TEXT), "what was known last stays"
    with contextlib.closing(PageServer(states.EMPTY | {"time": states.NOW + 7}, server.server_port)):
        page.wait(LIVE)
        page.wait(f"{DRAWN} === '{states.NOW + 7:.0f}'")
        assert "Nothing is running here yet" in page.evaluate(TEXT)


def test_silence_and_clocks_are_noticed(look: Look) -> None:
    """The connection stays open, and nothing comes: after 15 s the page says so, and opens another."""
    server, page = look(states.rich(time.time()))
    note = "document.getElementById('clock').textContent"

    def clocks_agree() -> bool:  # again where a busy machine took seconds from here to the page
        publish(server, page, states.rich(time.time()))
        return bool(page.evaluate(note) == "")

    wait_until(clocks_agree, "clocks that agree")
    publish(server, page, states.rich(time.time() - 7200))
    assert "ahead of the server's" in page.evaluate(note)
    publish(server, page, states.rich(time.time() + 7200))
    assert "behind the server's" in page.evaluate(note)
    assert not re.search(r"-\d+(\.\d+)? (s|min|h) ago", page.evaluate(TEXT)), "ages below zero"
    page.wait(f"/updated ([2-9]|1[0-9]) s ago/.test({STATUS})")

    def is_fresh() -> bool:  # a page that stood still for two seconds has missed what a single one did
        server.send("heartbeat", {"time": 0}, None)
        return bool(page.evaluate(f"/updated [01] s ago/.test({STATUS})"))

    wait_until(is_fresh, "a heartbeat that counts")
    assert page.evaluate(LIVE)
    streams = len(server.seen_ids)
    page.evaluate("""
        window.seen = [];
        new MutationObserver(() => seen.push(document.documentElement.dataset.connection))
            .observe(document.documentElement, {attributes: true});
        const now = performance.now.bind(performance);
        performance.now = () => now() + 16000;
    """)
    page.wait("seen.includes('lost')")
    wait_until(lambda: len(server.seen_ids) > streams, "another stream")
    page.wait(LIVE)


def test_hidden_tab_draws_when_shown(look: Look) -> None:
    server, page = look(states.rich())
    reason = "consul://10.0.0.7:8500 does not answer: connection refused"
    page.evaluate("""
        window.seen = "hidden";
        Object.defineProperty(document, "visibilityState", {get: () => seen, configurable: true});
    """)
    before = page.evaluate(DRAWN)
    for second in range(1, 6):
        server.publish(states.EMPTY | {"time": states.NOW + second, "stale": reason})
    server.publish('{"time": NaN')  # which says that all before it has come
    page.wait(f"{STATUS}.includes('no JSON') || {STATUS}.includes('lost')")
    assert page.evaluate(DRAWN) == before, "it draws though nobody looks"
    page.evaluate("window.seen = 'visible'; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(f"{DRAWN} === '{states.NOW + 5:.0f}'")
    assert reason in page.evaluate("document.querySelector('[role=status].stale').innerText")
    page.wait(LIVE)
    publish(server, page, states.rich(states.NOW + 6))
    assert not page.evaluate("document.getElementById('stale').checkVisibility()")


def test_page_of_the_real_server(browser: Browser, url: str, store: Store, tmp_path: Path) -> None:
    """A token as the password, a store's changes, and both over a restart, within the server's own policy."""
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    (tmp_path / "tokens").chmod(0o600)
    settings = DashboardSettings(
        store=url, port=free_ports(1)[0], credentials=Credentials(token_file=str(tmp_path / "tokens"))
    )
    with DashboardServer(settings) as server:
        page = browser.open(server.url.replace("://", f"://me:{TOKEN}@"))
        page.wait(f"document.getElementById('content')?.dataset.time && {IS_LIVE}")
        assert "Nothing is running here yet" in page.evaluate(TEXT)
        put_wanted(store, "teachers/digits", 3, "students wait <b>much</b>")
        page.wait(f"{TEXT}.includes('3 teachers wanted') && {TEXT}.includes('students wait <b>much</b>')")
        assert "Nothing is running here yet" not in page.evaluate(TEXT)
    page.wait(f"{TEXT}.includes('connection lost')")
    put_wanted(store, "teachers/digits", 5, "nobody looks")
    with DashboardServer(settings):
        page.wait(f"{IS_LIVE} && {TEXT}.includes('5 teachers wanted')")
    page.requests[:] = [asked.replace(f"me:{TOKEN}@", "") for asked in page.requests]
    _end(page, server.url)  # that the page keeps to the server's own policy
