"""`make docs`: MkDocs, which checks links, anchors and the navigation, builds the site without the network."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.lint.test_public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(420)

NOWHERE = "http://127.0.0.1:9"  # the port that discards: nothing listens there
PRIVATE = {"edl", "edl.cli", "edl.protocol"}
"""Packages without a page: the command line, and the wire's types."""


class Page(HTMLParser):
    """What a page fetches from elsewhere, and what may be linked to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        target = values.get("src", values.get("href", ""))
        if tag in ("img", "script", "link") and "://" in target and values.get("rel") != "canonical":
            self.external.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    pytest.importorskip("mkdocs", reason="the site needs the extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "http_proxy": NOWHERE, "https_proxy": NOWHERE, "all_proxy": NOWHERE},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {}
    for path in folder.rglob("*"):
        if path.is_file():
            pages[path.relative_to(folder).as_posix()] = page = Page()
            if path.suffix == ".html":
                page.feed(path.read_text())
    return pages


def test_pages_fetch_nothing(site: dict[str, Page]) -> None:
    """The theme's script would fetch mermaid.js where a page has such a diagram: pictures are SVG."""
    assert {name: page.external for name, page in site.items() if page.external} == {}
    assert [path.name for path in ROOT.glob("docs/**/*.md") if "```mermaid" in path.read_text()] == []


def test_public_names_have_a_reference(site: dict[str, Page]) -> None:
    ids = set().union(*(page.ids for name, page in site.items() if name.startswith("reference/")))
    documented = {f"{module}.{name}" for module, names in PUBLIC.items() if module not in PRIVATE for name in names}
    assert documented <= ids, f"not in docs/reference: {sorted(documented - ids)}"
