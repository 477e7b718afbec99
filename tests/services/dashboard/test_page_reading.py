"""The dashboard's page in a real browser: for people who see little, no colours, or use no mouse."""

from __future__ import annotations

import itertools

import pytest

from tests.services.dashboard import states
from tests.services.dashboard.conftest import Look

pytestmark = pytest.mark.chromium

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


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_is_that_of_wcag_aa(look: Look, dark: bool) -> None:
    _, page = look(states.rich() | {"stale": "the store does not answer"}, dark=dark)
    found = page.evaluate(CONTRAST)
    assert found["count"] > 200
    assert found["poor"] == []


def test_dark_and_light_differ(look: Look) -> None:
    _, page = look(states.rich())
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.set_dark(True)
    page.wait(f"{background} !== {light!r}")
    # Pictures are drawn again in other colours.
    assert page.evaluate("document.querySelectorAll('canvas').length") == 6


def test_structure_for_screen_readers(look: Look) -> None:
    _, page = look(states.rich())
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].filter(e => e.checkVisibility()).map(e => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "a level is left out"
    tables = page.evaluate("""[...document.querySelectorAll('table')].map(table => ({
        caption: table.caption?.textContent ?? '',
        columns: [...table.tHead.rows[0].cells].every(cell => cell.scope === 'col' && cell.textContent),
        rows: [...table.tBodies[0].rows].every(row => row.cells.length === table.tHead.rows[0].cells.length),
    }))""")
    assert len(tables) == 9
    assert all(each["caption"] and each["columns"] and each["rows"] for each in tables)
    unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert page.evaluate(unnamed) == 0
    # The connection, a store that is away, and a cluster that is.
    assert page.evaluate("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length") <= 3
    assert page.evaluate("document.documentElement.lang") == "en"
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in tree if not node["ignored"]]
    assert roles.count("table") == len(tables) - 2  # a dataset has neither poisoned shards nor holders
    assert {"columnheader", "rowheader"} <= set(roles)


def test_tables_stay_tables_on_a_phone(look: Look) -> None:
    _, page = look(states.rich(), 375, 800)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in tree if not node["ignored"]]
    assert roles.count("table") == 7
    assert roles.count("columnheader") > 30
    assert "rowheader" in roles


def test_keyboard_reaches_everything(look: Look) -> None:
    _, page = look(states.rich())
    page.evaluate("document.body.focus()")
    reached = []
    for _ in range(14):
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(page.evaluate(FOCUSED))
    assert reached[0].startswith("A To the content")
    assert sum(each.startswith("SUMMARY") for each in reached) == 3
    assert "INPUT events-filter" in reached


def test_words_stand_beside_colours(look: Look) -> None:
    """Each part of a bar is named with its share, each state has a sign and a word."""
    _, page = look(states.rich())
    legend = page.evaluate("document.querySelector('#jobs .legend').innerText")
    for word in states.CATEGORIES:
        assert word in legend, word
    bare = (
        "[...document.querySelectorAll('.badge')].filter(e => e.checkVisibility() && e.textContent.length < 2).length"
    )
    assert page.evaluate(bare) == 0
