"""`make docs`: the site is built without the network, its navigation has every page, and every link leads somewhere."""

from __future__ import annotations

import os
import posixpath
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.lint.test_public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(420)

NOWHERE = "http://127.0.0.1:9"  # the port that discards: nothing listens there
PRIVATE = {"edl", "edl.cli", "edl.protocol"}
"""Packages without a page: the command line, and the wire's types."""


@dataclass
class Page(HTMLParser):
    """What a page links to, and what may be linked to in it."""

    links: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script", "link") and (target := values.get("src", values.get("href", ""))):
            (self.external if "://" in target and values.get("rel") != "canonical" else self.links).append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    pytest.importorskip("mkdocs", reason="the site needs the extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
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


def resolved(link: str, page: str) -> tuple[str, str] | None:
    """The file and the anchor in it that a link on a page leads to; None where it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page, unquote(parts.fragment)


def test_every_link_leads_somewhere(site: dict[str, Page]) -> None:
    checked = 0
    for name, page in site.items():
        if name == "404.html":  # its links are of the server's root
            continue
        for link in page.links:
            if (target := resolved(link, name)) is not None:
                file, anchor = target
                file = posixpath.normpath(f"{file}/index.html") if file not in site else file
                assert file in site, f"{name} links to {link}"
                assert not anchor or anchor in site[file].ids, f"{name} links to {link}, which has no such anchor"
                checked += 1
    assert checked > 1000


def test_every_page_is_in_the_navigation(site: dict[str, Page]) -> None:
    reached = {target[0] for link in site["index.html"].links if (target := resolved(link, "index.html"))}
    pages = {name for name in site if name.endswith(".html")} - {"404.html"}
    written = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert written <= pages
    assert pages <= reached, f"not in the navigation: {sorted(pages - reached)}"


def test_pages_fetch_nothing(site: dict[str, Page]) -> None:
    """The theme's script would fetch mermaid.js where a page has such a diagram: pictures are SVG."""
    assert {name: page.external for name, page in site.items() if page.external} == {}
    assert [path.name for path in ROOT.glob("docs/**/*.md") if "```mermaid" in path.read_text()] == []


def test_public_names_have_a_reference(site: dict[str, Page]) -> None:
    ids = set().union(*(page.ids for name, page in site.items() if name.startswith("reference/")))
    documented = {f"{module}.{name}" for module, names in PUBLIC.items() if module not in PRIVATE for name in names}
    assert documented <= ids, f"not in docs/reference: {sorted(documented - ids)}"
