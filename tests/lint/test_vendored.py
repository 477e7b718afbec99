"""Files of others in the page: to the byte what VENDORED.md says, and nothing that the page fetches from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import edl.dashboard

STATIC = Path(edl.dashboard.__file__).parent / "static"
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts)
SCRIPTS = [path for path in OWN if path.suffix == ".js"]


def test_vendored_files_are_unchanged() -> None:
    listed = dict(
        re.findall(r"^\| `(vendor/[\w.]+)` .*`([0-9a-f]{64})` \|$", (STATIC / "VENDORED.md").read_text(), re.M)
    )
    found = {path.relative_to(STATIC).as_posix(): path for path in (STATIC / "vendor").rglob("*") if path.is_file()}
    assert set(listed) == set(found), "VENDORED.md lists each file below vendor/, and no other"
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name], name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_page_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    assert [each for each in addresses if each != "http://www.w3.org/2000/svg"] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_write_text_only(path: Path) -> None:
    """The policy that the server sends stops scripts in HTML, and not markup in it."""
    text = path.read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function(",
                "createContextualFragment", "setHTML", "srcdoc", "cssText"):  # fmt: skip
        assert way not in text, f"{path.name} uses {way}"


def test_document_has_nothing_inline() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)|javascript:", text)
