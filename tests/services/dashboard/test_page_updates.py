"""The dashboard's page in a real browser: updates, lost connections, tabs that sleep, clocks that differ."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import open_store
from edl.settings import Credentials
from tests.plugins_chromium import Browser
from tests.plugins_consul import free_ports
from tests.services.dashboard import states
from tests.services.dashboard.conftest import DRAWN, Look, publish
from tests.services.dashboard.page_server import PageServer
from tests.waiting import wait_until

TEXT = "document.body.innerText"
STATUS = "(document.querySelector('.connection')?.innerText ?? '')"
IS_LIVE = "document.documentElement.dataset.connection === 'live'"
LIVE = f"{IS_LIVE} && {STATUS}.includes('live')"
TOKEN = "0123456789abcdef0123456789abcdef"


def test_update_adds_to_the_history(look: Look) -> None:
    """A job comes and goes, and what its history had stays."""
    server, page = look(states.EMPTY)
    state = states.EMPTY | {"jobs": [states.job(points=50)], "time": states.NOW + 1}
    publish(server, page, state)
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")
    label = "document.querySelector('#jobs .slot:last-child .canvas').getAttribute('aria-label')"
    assert "from 22 Nov, 23:58" in page.evaluate(label)
    newer = copy.deepcopy(state)
    newer["time"] = states.NOW + 2
    newer["jobs"][0]["history"] = [state["jobs"][0]["history"][-1] | {"t": states.NOW + 2, "samples_per_s": 4321.0}]
    publish(server, page, newer, "update")
    label_now = page.evaluate(label)
    assert "now 4,321 samples/s" in label_now
    assert "from 22 Nov, 23:58" in label_now, "the points before are gone"
    publish(server, page, states.EMPTY | {"time": states.NOW + 3})
    assert page.evaluate("document.getElementById('empty').checkVisibility()")


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
    with PageServer(states.EMPTY | {"time": states.NOW + 7}, port=server.port):
        page.wait(LIVE)
        page.wait(f"{DRAWN} === '{states.NOW + 7:.0f}'")
        assert "Nothing runs here yet" in page.evaluate(TEXT)


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
        server.beat()
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


def _wanted(count: int, reason: str) -> bytes:
    now = time.time()
    record = {"v": 1, "service": "digits", "count": count, "now": 1, "reason": reason, "since": now, "time": now}
    return json.dumps(record | {"decisions": [{"time": now, "from": 1, "count": count, "reason": reason}]}).encode()


def test_page_of_the_real_server(browser: Browser, tmp_path: Path) -> None:
    """A form for the token, a store's changes, and both again over a restart, within the server's own policy."""
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    (tmp_path / "tokens").chmod(0o600)
    url = f"sqlite:///{tmp_path}/store.sqlite"
    settings = DashboardSettings(
        store=url, port=free_ports(1)[0], credentials=Credentials(token_file=str(tmp_path / "tokens"))
    )
    form = "document.querySelector('input[type=password]')"
    log_in = f"{form}.value = {TOKEN!r}; {form}.form.requestSubmit()"
    with open_store(url) as store:
        with DashboardServer(settings) as server:
            page = browser.open(server.url)
            page.wait(f"!!{form}")
            page.evaluate(log_in)
            page.wait(f"document.getElementById('content')?.dataset.time && {IS_LIVE}")
            assert "Nothing runs here yet" in page.evaluate(TEXT)
            store.put("wanted/teachers/digits", _wanted(3, "students wait <b>much</b>"))
            page.wait(f"{TEXT}.includes('3 teachers wanted') && {TEXT}.includes('students wait <b>much</b>')")
            assert "Nothing runs here yet" not in page.evaluate(TEXT)
        page.wait(f"{TEXT}.includes('connection lost')")
        store.put("wanted/teachers/digits", _wanted(5, "nobody looks"))
        with DashboardServer(settings):
            page.wait(f"!!{form}")  # the cookie is worthless after a restart
            page.evaluate(log_in)
            page.wait(f"{IS_LIVE} && {TEXT}.includes('5 teachers wanted')")
    page.evaluate("1")
    amiss = [each for each in page.troubles if not each.startswith("network: Failed to load resource")]
    assert amiss == [], "the page breaks the server's own policy"
    page.close()
