"""The site is built without the network, its links lead somewhere, and it loads nothing else."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

ROOT = Path(__file__).parents[2]
#: What makes a browser fetch something; a link in the text does so only when somebody follows it.
FETCHES = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "object": "data",
    "embed": "src",
}


class Page(html.parser.HTMLParser):
    """What a page has, and what it points at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if anchor := named.get("id"):
            self.anchors.add(anchor)
        if tag == "a" and (target := named.get("href")):
            self.links.append(target)
        fetched = named.get(FETCHES.get(tag, ""))
        # What only says where the page itself is, is not fetched.
        if fetched and named.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(fetched)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    # A proxy that is not there: whoever wants to fetch something while building fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


@pytest.mark.feature("P7")
@pytest.mark.timeout(400)
def test_every_link_inside_the_site_leads_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are made for the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            is_there = target.is_relative_to(site) and target.exists()
            has_anchor = not parts.fragment or (
                target in pages and unquote(parts.fragment) in pages[target].anchors
            )
            if not is_there or not has_anchor:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken
    assert len(pages) > 30


def test_no_page_loads_anything_from_elsewhere(site, pages):
    elsewhere = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.fetched
        if urlsplit(address).scheme in ("http", "https") or address.startswith("//")
    ]
    assert not elsewhere
    assert sum(len(page.fetched) for page in pages.values()) > 100
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_page_is_in_the_navigation(site, pages):
    names = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    listed = set(_files(config["nav"]))
    assert names == listed
    # What people need to find: tutorial, how-to, reference, explanation.
    assert [next(iter(part)) for part in config["nav"]] == [
        "Home",
        "Tutorial",
        "How to",
        "Reference",
        "Explanation",
    ]


def _files(part: object) -> list[str]:
    if isinstance(part, str):
        return [part]
    entries = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [name for entry in entries for name in _files(entry)]


@pytest.mark.feature("P7")
def test_the_reference_shows_what_the_code_says(site):
    text = (site / "reference" / "sending.html").read_text()

    assert "Sends messages; may be used by any number of threads at a time." in text
    assert 'id="orbitmq.client.producer.producer.Producer.send_batch"' in text
