"""The pages of docs/ as a site: built strictly and without a network, whole, and without a request to other hosts."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree

import pytest

from tests.chromium import opened
from tests.project import ROOT

# mkdocs in a process that cannot connect to anything.
BUILD = """
import socket, sys

def refuse(*arguments):
    raise OSError(f"the build asked the network for {arguments[-1]}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-c", BUILD, str(site)]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Reader(HTMLParser):
    """What a page shows in paragraphs, what it loads, and where it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.inside = self.code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        if tag == "p":
            self.inside = True
            self.paragraphs.append("")
        self.code |= tag == "code"
        if tag in ("script", "img", "iframe", "source") and "src" in said:
            self.loads.append(said["src"])
        assert tag != "img" or said.get("alt"), said
        if tag == "link":
            self.loads.append(said["href"])
        if tag == "a" and "href" in said:
            self.links.append(said["href"])

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "p"
        self.code &= tag != "code"

    def handle_data(self, data: str) -> None:
        if self.inside and not self.code:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Reader]:
    return {str(path.relative_to(site)): Reader(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_reached_from_the_navigation(site: Path, pages: dict[str, Reader]) -> None:
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert written <= {Path(name) for name in pages}
    begin = (site / "index.html").read_text()
    _, _, navigation = begin.partition('<nav class="md-nav md-nav--primary')
    reached = {link.partition("#")[0] for link in Reader(navigation.partition("<article")[0]).links}
    assert set(pages) - reached == {"404.html"}


def test_what_pages_say_is_rendered(pages: dict[str, Reader]) -> None:
    """GitHub makes lists and tables where Python's Markdown wants an empty line before them."""
    raw = re.compile(r"^\s*(\||[-*] |\d\. |```|#+ )", re.MULTILINE)
    left = [(name, text) for name, page in pages.items() for text in page.paragraphs if raw.search(text)]
    assert left == []


def test_pages_load_only_files_of_the_site(site: Path, pages: dict[str, Reader]) -> None:
    for name, page in pages.items():
        for load in page.loads:
            assert name == "404.html" or (site / name).parent.joinpath(load).resolve().is_file(), (name, load)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", styles)


def test_pictures_are_whole_and_have_a_text(pages: dict[str, Reader]) -> None:
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert pictures
    for path in pictures:
        root = ElementTree.fromstring(path.read_text())
        assert root.get("role") == "img" and root.get("aria-label"), path
        assert path.read_text().count("http") == 1, f"{path} names something beside its namespace"
        assert any(load.endswith(path.name) for page in pages.values() for load in page.loads), f"no page shows {path}"


def test_screenshots_are_small_and_shown(pages: dict[str, Reader]) -> None:
    pictures = sorted((ROOT / "docs/pictures").iterdir())
    assert {path.suffix for path in pictures} == {".png", ".svg"}
    for path in pictures:
        assert path.stat().st_size < 300_000, path
        assert any(load.endswith(path.name) for page in pages.values() for load in page.loads), f"no page shows {path}"


def test_a_browser_asks_no_other_host_and_finds_words(site: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        with opened(f"{here}index.html", 1500) as browser:
            browser.chrome.find_element("css selector", "input.md-search__input").send_keys("broker_port_base")
            found = "return document.querySelector('.md-search-result').innerText"
            for _ in range(200):
                if "Settings" in browser.asked(found):
                    break
                time.sleep(0.1)
            assert "Settings" in browser.asked(found)
            asked = browser.requests()
            assert any(url.endswith(".css") for url in asked)
            assert [url for url in asked if not url.startswith((here, "data:", "blob:"))] == []
            assert browser.complaints() == []
        server.shutdown()


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("tools/", f"{ROOT}/tools/"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/tls.md").write_text("# TLS\n")
    links = "[a](nowhere.md) [b](../nowhere.toml) [c](tls.md#nowhere)"
    (tmp_path / "docs/index.md").write_text(f"# Pages\n\n{links} [d](tls.md) [e](../deploy/kproxy.toml)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert [link for link in ("nowhere.md", "../nowhere.toml", "tls.md#nowhere") if link not in done.stderr] == []
