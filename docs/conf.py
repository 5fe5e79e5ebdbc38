"""How Sphinx makes the site of these pages: ``make docs`` writes it to build/site.

The pages stay plain Markdown that is read on its own; the tables of docs/index.md are the navigation, and the API
reference (docs/api) comes from docstrings. Nothing is loaded from elsewhere: the site opens from the file system.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "foredraft"
author = "foredraft developers"
project_copyright = "foredraft developers, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "dev/**.md", "examples/**.md", "src/foredraft/zoo/**.md"]
exclude_patterns = ["build", "dist", ".*", "tests", "benchmarks", "**/__pycache__"]

myst_heading_anchors = 4
default_role = "py:obj"  # in docstrings: a link where the reference has such a name, else code

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}
html_title = "foredraft"
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would read pages, which a browser refuses on a file system
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars: dict[str, list[str]] = {"**": ["pages.html"]}
html_theme_options = {
    "logo": {"text": "foredraft"},
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-field"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "search_as_you_type": True,
}


INLINE = re.compile(r"^(Returns|Raises|Yields|Exactness|Randomness|Source|Shapes?): +(\S.*)$")
"""Sections of docstrings that begin on the line of their name; napoleon knows those that begin on the next."""

HEADING = re.compile(r"^\w[\w ]*:$")
"""Sections of docstrings that napoleon knows."""

PARAMETERS = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")
"""What Sphinx writes for a signature of several lines."""


def captioned_pages() -> list[tuple[str, list[str]]]:
    """Captions and pages of the navigation: the tables of docs/index.md, the methods, the reference, development."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    tables = re.findall(r"^(?:\*\*|## )(.+?)(?:\*\*)?\n\n(\| page \|.*\n(?:\|.*\n)+)", text, re.MULTILINE)
    found = [
        (caption, [f"docs/{page}" for page in re.findall(r"^\| \[[^]]*\]\((\w+)\.md\)", rows, re.MULTILINE)])
        for caption, rows in tables
    ]
    found.append(("Methods", _by_name("docs/methods/*.md")))
    found.append(("Reference", sorted(_pages("docs/api/*.rst"), key=lambda page: page != "docs/api/foredraft")))
    found.append(("Develop", ["CHANGELOG", "CONTRIBUTING", "dev/README"]))
    return [("", ["docs/index"]), *found]


def pages_for_developers() -> list[tuple[str, list[str]]]:
    """Captions and pages below dev/README, which the navigation shows only there."""
    return [
        ("Develop", [page for page in _pages("dev/[a-z]*.md") if page != "dev/README"]),
        ("Measurements", _by_name("dev/measurements/*.md")),
        ("Log", _by_name("dev/log/*.md")),
        ("Beside the pages", _pages("examples/*/*.md") + _pages("src/**/*.md")),
    ]


def _pages(pattern: str) -> list[str]:
    return sorted(str(page.relative_to(ROOT).with_suffix("")) for page in ROOT.glob(pattern))


def _by_name(pattern: str) -> list[str]:
    """Pages that a list shows by the names of their files, since their titles are sentences."""
    return [f"{page.rsplit('/', 1)[1]} <{page}>" for page in _pages(pattern)]


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Append hidden tables of contents to the two pages that have them; GitHub shows none.

    Headings that the log links to may have been renamed since, so their anchors are dropped.
    """
    if name.startswith("dev/log/"):
        source[0] = re.sub(r"\.md#[\w-]+\)", ".md)", source[0])
    trees = {root_doc: captioned_pages, "dev/README": pages_for_developers}
    if name in trees:
        for caption, pages in trees[name]():
            options = ":hidden:" + (f"\n:caption: {caption}" if caption else "")
            source[0] += "\n".join(
                ["", "```{toctree}", options, "", *(_beside(name, page) for page in pages), "```", ""]
            )


def _beside(name: str, page: str) -> str:
    """An entry of a table of contents on a page: absolute, since the page may lie in a folder."""
    title, separator, path = page.rpartition(" <")
    return f"{title}{separator}/{path}"


def open_sections(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make paragraphs with a bold name of sections like "Returns: one result per prompt", for reStructuredText."""
    made: list[str] = []
    within = False
    for line in lines:
        if found := INLINE.match(line):
            made += ["", f"**{found[1]}:** {found[2]}"]
            within = True
        elif within and line.strip() and not HEADING.match(line):  # continues the section, with or without an indent
            made.append(line.strip())
        else:
            made += ["", line] if within and line else [line]
            within = False
    lines[:] = made


def mend(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Without lists of definitions that define nothing, and without headings of columns that say nothing."""
    if "body" in context:
        body = PARAMETERS.sub(
            lambda found: found[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>"),
            context["body"],
        )
        context["body"] = re.sub(r'<th class="head">(<p></p>)?</th>', "<td></td>", body)


def leave_out_of_search(app: Sphinx, doctree: object) -> None:
    """The logs name everything that was ever tried."""
    if app.env.docname.startswith("dev/log/"):
        app.env.metadata[app.env.docname]["nosearch"] = True


def write_entrance(app: Sphinx, error: Exception | None) -> None:
    """index.html, by which a folder of pages is opened."""
    if error is None and app.builder.name == "html":
        refresh = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        text = f'<!doctype html><html lang="en"><title>foredraft</title>{refresh}</html>'
        (app.outdir / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", open_sections, priority=400)
    app.connect("html-page-context", mend)
    app.connect("doctree-read", leave_out_of_search)
    app.connect("build-finished", write_entrance)
