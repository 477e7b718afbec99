"""A hook of MkDocs: pages and pictures outside of `docs/`, and links that hold there as they do in the repository.

The README is the site's first page. A link to a file that is no page (a test, a program) becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

EXAMPLES = ("ctr", "digits", "elastic", "llm", "nlp", "paddle", "resnet", "shards", "train")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in EXAMPLES},
    "examples/llm/students.png": "examples/llm-students.png",
    "examples/resnet/accuracy.png": "examples/resnet-accuracy.png",
    "examples/nlp/accuracy.png": "examples/nlp-accuracy.png",
}
"""Pages and pictures outside of `docs/`: their path in the repository, and on the site."""

_SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's, with its plugin `offline`
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that lie outside of `docs/`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site."""
    sources = {on_site: source for source, on_site in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = _FENCE.split(markdown)
    parts[::2] = [_with_links(part, source, page.file.src_uri) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Mark short names, such as `--max-delay`, so that browsers do not break them at a hyphen (docs/site.css)."""
    return re.sub(r"<code>([^<\n]{1,28})</code>", r'<code class="short">\1</code>', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the script by which search works in pages from the disk from this site, not from the network."""
    return output.replace(_SHIM, posixpath.relpath("search.js", posixpath.dirname(page.url) or "."))


def on_post_template(output: str, **_: Any) -> str:
    """Do the same in 404.html, which names files from the server's root."""
    return output.replace(_SHIM, "/search.js")


def _with_links(text: str, source: str, page: str) -> str:
    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        found, anchor = _on_site(target, source, page)
        if found is None:
            path = _in_repository(target, source)
            return label if label.strip("`") == path else f"{label} (`{path}`)"
        return f"[{label}]({found}{anchor})"

    def picture(match: re.Match[str]) -> str:
        found, _ = _on_site(match[2], source, page)
        return f"{match[1]}{found or match[2]})"

    return _PICTURE.sub(picture, _LINK.sub(link, text))


def _in_repository(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def _on_site(target: str, source: str, page: str) -> tuple[str | None, str]:
    """The target relative to the page, or None for a file that the site does not have; and the anchor."""
    _, mark, anchor = target.partition("#")
    path = _in_repository(target, source)
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md"
    on_site = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if on_site is None:
        return None, mark + anchor
    return posixpath.relpath(on_site, posixpath.dirname(page) or "."), mark + anchor
