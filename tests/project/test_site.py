"""The site of the documentation: strict, whole, of itself alone, and readable on a telephone."""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
import zlib
from contextlib import redirect_stderr
from html.parser import HTMLParser
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from sphinx.cmd.build import main as sphinx
from test_docs import PAGES, ROOT, blocks

import foredraft

pytestmark = pytest.mark.slow

ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make docs`` builds it: what Sphinx warns of, a link that leads nowhere for instance, is an error."""
    made = tmp_path_factory.mktemp("site")
    options = ["-b", "html", "-W", "--keep-going", "-q", "-c", "docs", "-d", str(made / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(made / "html")]
    assert " ".join(command[1:10]) in (ROOT / "Makefile").read_text(encoding="utf-8")
    told = made / "told.txt"
    child = get_context("fork").Process(target=be_sphinx, args=(command[3:], told))  # which need not load torch again
    child.start()
    child.join(900)
    assert child.exitcode == 0, told.read_text(encoding="utf-8")
    return made / "html"


def be_sphinx(arguments: list[str], told: Path) -> None:
    warnings.simplefilter("default")  # those of Python are errors in this suite; Sphinx counts its own
    os.chdir(ROOT)
    with told.open("w", encoding="utf-8") as sys.stdout, redirect_stderr(sys.stdout):
        sys.exit(sphinx(arguments))


class Assets(HTMLParser):
    """What a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == ASSETS.get(tag) and value]


@pytest.mark.full
def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    for page in site.rglob("*.html"):
        assets = Assets()
        assets.feed(page.read_text(encoding="utf-8"))
        assert not [url for url in assets.found if re.match(r"\w+:|//", url) and not url.startswith("data:")], page
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import\s+)['\"]?(?:https?:)?//[^)'\"]*", sheet.read_text(encoding="utf-8"))
        assert not found, sheet


@pytest.mark.full  # `make docs` builds the same site and fails on warnings
def test_the_reference_holds_what_is_public(site: Path) -> None:
    """The names of foredraft, and whatever a python block of a page imports from it."""
    compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split(" ")[0] for line in zlib.decompress(compressed).decode().splitlines()}
    public = {f"foredraft.{name}" for name in foredraft.__all__}
    for page in [page for page in PAGES if ROOT / "dev" not in page.parents]:
        for node in ast.walk(ast.parse("\n".join(blocks(page, "python")))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("foredraft"):
                public |= {f"{node.module}.{one.name}" for one in node.names}
    assert len(public) > 30
    assert public - names == set()


@pytest.mark.full
def test_it_is_read_and_searched_from_the_file_system(site: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme="dark")
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.goto((site / "index.html").as_uri())
        page.wait_for_url("**/README.html")
        assert page.locator("html").get_attribute("data-theme") == theme
    for shown in [*PAGES, ROOT / "docs/api/foredraft", ROOT / "docs/api/classic"]:
        page.goto((site / shown.relative_to(ROOT).with_suffix(".html")).as_uri())
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wider <= 0, f"{shown.name} is {wider} pixels wider than a window of {width}"
    page.goto(f"{(site / 'search.html').as_uri()}?q=token_recycling")
    page.locator("#search-results a").first.wait_for()
    found = page.locator("#search-results a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert any("docs/methods/token_recycling.html" in href for href in found)
    assert not any("dev/log" in href for href in found)
    assert faults == []
    page.close()
