"""The dashboard's page in a real browser: updates, lost connections, tabs that sleep, clocks that differ."""

from __future__ import annotations

import copy
import re
import time

import pytest

from tests.plugins_consul import free_ports
from tests.services.dashboard import states
from tests.services.dashboard.conftest import DRAWN, Look, publish, wait_until
from tests.services.dashboard.page_server import PageServer

pytestmark = pytest.mark.chromium
STATUS = "(document.querySelector('.connection')?.innerText ?? '')"
LOST = f"{STATUS}.includes('connection lost')"
LIVE = f"document.documentElement.dataset.connection === 'live' && {STATUS}.includes('live')"


def test_update_adds_to_the_history(look: Look) -> None:
    state = states.EMPTY | {"jobs": [states.job(points=50)]}
    server, page = look(state)
    label = "document.querySelector('#jobs .slot:last-child .canvas').getAttribute('aria-label')"
    assert "from 22 Nov, 23:58" in page.evaluate(label)
    newer = copy.deepcopy(state)
    newer["time"] = states.NOW + 2
    newer["jobs"][0]["history"] = [state["jobs"][0]["history"][-1] | {"t": states.NOW + 2, "samples_per_s": 4321.0}]
    publish(server, page, newer, "update")
    label_now = page.evaluate(label)
    assert "now 4,321 samples/s" in label_now
    assert "from 22 Nov, 23:58" in label_now, "the points before are gone"


def test_every_figure_follows_updates(look: Look) -> None:
    """What is on the page after an update is what a page shows that is opened then."""
    server, page = look(states.rich())
    later = copy.deepcopy(states.rich(states.NOW + 3600))
    for job in later["jobs"]:
        job |= {
            "step": 9999,
            "steps_per_s": 1.5,
            "samples_per_s": 77.0,
            "goodput": 0.5,
            "world_size": 2,
            "generation": 8,
        }
        job["seconds"] = {name: 10.0 * (1 + index) for index, name in enumerate(states.CATEGORIES)}
        for node in job["nodes"]:
            node |= {"state": "idle", "goodput": 0.25, "step": 9998, "silent_s": 7.0, "ranks": [5]}
    for dataset in later["jobs"][0]["master"]["datasets"]:
        dataset |= {
            "shards": {"todo": 5, "doing": 5, "done": 5, "poisoned": 5},
            "epoch": 1,
            "units_per_s": 5.0,
            "eta_s": 5.0,
        }
        for holder in dataset["holders"]:
            holder |= {"leases": 9, "units_done": 9, "units_per_s": 9.0, "seen_s": 9.0}
    for teacher in later["services"][0]["teachers"]:
        teacher |= {
            "state": "lapsed",
            "rows_per_s": 1.0,
            "queue_rows": 7,
            "compute_share": 0.1,
            "version": "v2",
            "students": [],
        }
    for student in later["services"][0]["students"]:
        student |= {"rows_per_s": 3.0, "wait_share": 0.01, "teachers": ["teacher-4"], "job": "another"}
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
    before = page.evaluate(f"new Promise(done => setTimeout(() => done({places}), 300))")
    for second in (1, 2):
        publish(server, page, states.rich(states.NOW) | {"time": states.NOW + second})
    assert page.evaluate(places) == before
    assert page.evaluate("document.activeElement.id") == "events-filter"
    assert page.evaluate("getSelection().toString()").startswith("imagenet-train")
    assert page.evaluate("[...document.querySelectorAll('#jobs details')].at(-1).open")


def test_a_job_comes_and_goes(look: Look) -> None:
    server, page = look(states.EMPTY)
    publish(server, page, states.rich(states.NOW + 1))
    assert not page.evaluate("document.getElementById('empty').checkVisibility()")
    assert page.evaluate("document.querySelectorAll('#jobs details').length") == 3
    publish(server, page, states.EMPTY | {"time": states.NOW + 2})
    assert page.evaluate("document.getElementById('empty').checkVisibility()")
    assert page.evaluate("document.querySelectorAll('canvas').length") == 6, "hidden, and not drawn again"


def test_lost_connection_is_said_and_mended(look: Look) -> None:
    """The server goes away, and another comes to its port."""
    server, page = look(states.rich(), port=free_ports(1)[0])  # which no connection is given meanwhile
    page.wait(LIVE)
    server.close()
    page.wait(LOST)
    assert "last update" in page.wait(f"{STATUS}.includes('trying again') && {STATUS}")
    assert "resnet50-imagenet" in page.evaluate("document.body.innerText"), "what was known last stays"
    with PageServer(states.EMPTY | {"time": states.NOW + 7}, port=server.port):
        page.wait(LIVE)
        page.wait(f"{DRAWN} === '{states.NOW + 7:.0f}'")
        assert "Nothing runs here yet" in page.evaluate("document.body.innerText")


def test_reconnect_names_the_last_event(look: Look) -> None:
    server, page = look(states.rich())
    publish(server, page, states.rich(states.NOW + 1))
    server.drop()
    wait_until(lambda: len(server.seen_ids) > 1)
    assert server.seen_ids[-1] == "1"
    page.wait(LIVE)


@pytest.mark.parametrize("status", [500, 404])
def test_refused_stream_is_tried_again(look: Look, status: int) -> None:
    """EventSource gives up after an HTTP error; the page does not, and says which it was."""
    server, page = look(states.rich())
    publish(server, page, states.rich(states.NOW + 1))
    server.refuse = status
    server.drop()
    page.wait(f"{STATUS}.includes('the server answers {status}')")
    server.refuse = 0
    page.wait(LIVE)
    assert server.seen_ids[-1] in ("", "1")
    assert "1" in server.seen_ids[1:]


def test_page_loads_again_for_the_token(look: Look) -> None:
    """A 401 means that the server has a form for the token to show in the page's place; it is asked for once."""
    server, page = look(states.rich())
    server.refuse = 401
    server.drop()
    wait_until(lambda: page.wait("true") and page.requests.count(server.url) > 1)
    page.wait(f"{STATUS}.includes('the server answers 401')")
    streams = len(server.seen_ids)
    wait_until(lambda: len(server.seen_ids) > streams + 1)
    page.evaluate("1")
    assert page.requests.count(server.url) == 2, "it loads again and again"
    server.refuse = 0
    page.wait(LIVE)


@pytest.mark.slow
def test_silent_stream_is_noticed(look: Look) -> None:
    """The connection stays open, and nothing comes: after 15 s the page says so, and opens another."""
    server, page = look(states.rich())
    page.evaluate("""
        window.seen = [];
        new MutationObserver(() => seen.push(document.documentElement.dataset.connection))
            .observe(document.documentElement, {attributes: true});
    """)
    began = time.monotonic()
    publish(server, page, states.rich(states.NOW + 1))
    page.wait("seen.includes('lost')")
    assert time.monotonic() - began > 10, "a server that is a little slow is no lost one"
    wait_until(lambda: len(server.seen_ids) > 1)
    page.wait(LIVE)


def test_heartbeats_keep_it_live(look: Look) -> None:
    server, page = look(states.rich())
    page.wait(f"/updated ([2-9]|1[0-9]) s ago/.test({STATUS})")

    def is_fresh() -> bool:  # a page that stood still for two seconds has missed what a single one did
        server.beat()
        return bool(page.evaluate(f"/updated [01] s ago/.test({STATUS})"))

    wait_until(is_fresh)
    assert page.evaluate(LIVE)


def test_garbage_in_the_stream(look: Look) -> None:
    server, page = look(states.rich())
    server.publish('{"time": NaN')
    page.wait(f"{STATUS}.includes('no JSON') || {LIVE}")
    wait_until(lambda: len(server.seen_ids) > 1)
    page.wait(LIVE)
    assert "resnet50-imagenet" in page.evaluate("document.body.innerText")


def test_hidden_tab_draws_when_shown(look: Look) -> None:
    server, page = look(states.rich())
    page.evaluate("""
        window.seen = "hidden";
        Object.defineProperty(document, "visibilityState", {get: () => seen, configurable: true});
    """)
    before = page.evaluate(DRAWN)
    for second in range(1, 6):
        server.publish(states.EMPTY | {"time": states.NOW + second, "store": f"store {second}"})
    page.evaluate("new Promise(done => setTimeout(done, 500))")
    assert page.evaluate(DRAWN) == before, "it draws though nobody looks"
    page.evaluate("window.seen = 'visible'; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(f"{DRAWN} === '{states.NOW + 5:.0f}'")


def test_different_clocks_are_said(look: Look) -> None:
    server, page = look(states.rich(time.time()))
    note = "document.getElementById('clock').textContent"

    def clocks_agree() -> bool:  # again where a busy machine took seconds from here to the page
        publish(server, page, states.rich(time.time()))
        return bool(page.evaluate(note) == "")

    wait_until(clocks_agree)
    publish(server, page, states.rich(time.time() - 7200))
    assert "ahead of the server's" in page.evaluate(note)
    publish(server, page, states.rich(time.time() + 7200))
    assert "behind the server's" in page.evaluate(note)
    assert not re.search(r"-\d+(\.\d+)? (s|min|h) ago", page.evaluate("document.body.innerText")), "ages below zero"


def test_stale_figures_are_announced(look: Look) -> None:
    server, page = look(states.rich())
    reason = "consul://10.0.0.7:8500 does not answer: connection refused"
    publish(server, page, states.rich(states.NOW + 1) | {"stale": reason})
    assert reason in page.evaluate("document.querySelector('[role=status].stale').innerText")
    publish(server, page, states.rich(states.NOW + 2))
    assert not page.evaluate("document.getElementById('stale').checkVisibility()")
