"""What the README, docs and dev show is run: python blocks, commands, links, and the examples."""

from __future__ import annotations

import importlib
import json
import logging
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import LLM
from foredraft.cli import app
from foredraft.cli.running import respell

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "dev").rglob("*.md"))]
SECONDS_OF_A_LOOK = 1.0
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def commands() -> list[tuple[str, ...]]:
    """The lines of every block, once: one may read what the one before has written."""
    shown = [block.replace("\\\n", " ") for page in PAGES for block in blocks(page, "bash")]
    return list(dict.fromkeys(tuple(line for line in block.splitlines() if line) for block in shown))


def shortened(arguments: list[str]) -> list[str]:
    """The command with no more tokens than show that it works."""
    if arguments[0] not in ("generate", "trajectory"):
        return arguments
    if "--max-new-tokens" not in arguments:
        return [*arguments, "--max-new-tokens", "16"]
    place = arguments.index("--max-new-tokens") + 1
    return [*arguments[:place], str(min(16, int(arguments[place]))), *arguments[place + 1 :]]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A page may show how to see what is logged."""
    root, ours = logging.getLogger(), logging.getLogger("foredraft")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.fixture
def _counted_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of `verify` end after a number of looks at the clock, the same on every machine."""
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, SECONDS_OF_A_LOOK)))
    for module in ("verifying", "draws"):
        monkeypatch.setattr(f"foredraft.verify.{module}.time", clock)


RUN = subprocess.run


def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` whose commands of ours run in this process, so that they need not load torch again."""
    if command[:3] != [sys.executable, "-m", "foredraft"]:
        return RUN(command, **options)
    result = CliRunner().invoke(app, respell(command[3:]))
    assert result.exit_code == 0, result.output
    return subprocess.CompletedProcess(command, 0)


READ_FIRST = ("README.md",)
"""Pages whose code is run by `make test`; `.ci/run` runs that of all pages."""


@pytest.mark.slow
@pytest.mark.usefixtures("_governed", "_loaded_once")  # as a reader runs it
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name in READ_FIRST else pytest.mark.full, id=page.name)
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("_governed", "_loaded_once", "_counted_seconds")
@pytest.mark.parametrize("lines", commands(), ids="; ".join)
def test_commands_run(lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "foredraft":
            result = CliRunner().invoke(app, respell(shortened(arguments)))
            assert result.exit_code == 0, result.output
            assert result.output
        else:
            subprocess.run(["bash", "-ec", line], check=True, timeout=60)


def test_every_page_shows_something_that_runs_or_is_read() -> None:
    assert len(commands()) >= 8
    assert {page.name for page in PAGES} >= {"README.md", "cli.md", "exactness.md", "index.md"}
    for page in PAGES:
        found = BLOCK.findall(page.read_text(encoding="utf-8"))
        assert {language for language, _ in found} <= {"python", "bash", "sh", "text"}, page
        assert not any(re.search(r"^\$ ", body, re.MULTILINE) for _, body in found), f"{page}: cannot be pasted"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_lines_of_pages_for_users_are_short() -> None:
    pages = [page for page in PAGES if ROOT / "dev" not in page.parents]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    long = [
        f"{page.name}:{n}"
        for page, text in texts.items()
        for n, line in enumerate(text.split("\n"), 1)
        if len(line) > 120 and not line.startswith("|")  # a row of a table cannot be wrapped
    ]
    assert long == []


def test_anchors_are_headings() -> None:
    """Of pages for users and of the list of sections; a site that is built strictly looks at no files beside it."""
    for page in [page for page in PAGES if ROOT / "dev" not in page.parents or page.name == "from_the_documents.md"]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in known, f"{page.name} -> {target}#{anchor}"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("_loaded_once", "_counted_seconds")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", run_here)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their cells in order, in one namespace, as a kernel runs them; the outputs that are kept contain no warning."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        assert all(output.get("name") == "stdout" for output in cell.get("outputs", ())), "a warning or an error"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), namespace)
    shown = capsys.readouterr().out
    assert "[" in shown
    assert "False" not in shown


def test_keys_are_listed_as_the_options_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    made: dict[Path, str] = importlib.import_module("make_keys").pages()
    assert len(made) > 10
    for page, text in made.items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run python docs/make_keys.py"


def test_pictures_show_a_draft_and_what_was_accepted_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They once named a module that had moved, which nothing noticed: programs of docs/ are imported by no other."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    make_trees = importlib.import_module("make_trees")
    llm = LLM("zoo:tiny", "token_recycling")
    step = make_trees.best_step(llm, "How do I use the command tar?", 24)
    picture = make_trees.drawing(llm, step)
    assert 1 < len(step.path) < len(step.tree), "nothing to tell apart"
    assert picture.count('class="hit"') == len(step.path)
    assert picture.count('class="miss"') == len(step.tree) - len(step.path)
    assert picture.count('class="on"') == step.num_accepted
