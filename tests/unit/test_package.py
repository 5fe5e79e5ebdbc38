"""What a package index shows, and the files that people look for first."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

import foredraft

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(markdown: str) -> Iterator[str]:
    """Where the links and pictures of a page lead."""
    for block in MarkdownIt().parse(markdown):
        for token in block.children or ():
            target = token.attrs.get("href") or token.attrs.get("src")
            if target is not None:
                yield str(target)
        if block.type == "html_block":
            yield from re.findall(r"(?:src|href)=[\"']([^\"']+)", block.content)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [the page](docs/cli.md#generate).", "see the page (docs/cli.md)."),
        ("see [docs/cli.md](docs/cli.md).", "see docs/cli.md."),
        ("| [`a+b`, `a>b`](docs/methods/composition.md) |", "| `a+b`, `a>b` (docs/methods/composition.md) |"),
        ("[below](#how-fast)", "below"),
        ("[paper](https://arxiv.org/abs/2211.17192)", "[paper](https://arxiv.org/abs/2211.17192)"),
        ("![what it looks like](docs/demo.svg) text", " text"),
        ('<img src="docs/demo.svg" alt="demo"> text', " text"),
        ("`LLM[x](y)` and [z](w)", "`LLM[x](y)` and z (w)"),
        ("```python\nf[a](b)\n```\n[z](w)", "```python\nf[a](b)\n```\nz (w)"),
    ],
)
def test_relative_links_become_paths(hatch_build: ModuleType, text: str, shown: str) -> None:
    described = hatch_build.long_description(f"# Title\n\n{text}")
    assert described == f"# Title\n\n{hatch_build.WHERE}\n\n{shown}"


def test_the_long_description_has_no_dead_links(hatch_build: ModuleType) -> None:
    """No public address of the checkout exists, so that on a package index every relative link was dead."""
    described = hatch_build.long_description(read("README.md"))
    assert [target for target in targets(described) if not target.startswith("https://")] == []
    assert "docs/index.md" in described
    assert "in the source distribution" in described


def test_the_links_of_the_readme_survive_where_they_lead_somewhere(hatch_build: ModuleType) -> None:
    readme = read("README.md")
    absolute = [target for target in targets(readme) if target.startswith("https://")]
    assert list(targets(hatch_build.long_description(readme))) == absolute


def test_versions_agree() -> None:
    """The version once was 0.1.0 while the changelog called the same state unreleased."""
    version = foredraft.__version__
    newest = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)[0]
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    if ".dev" in version:
        assert newest == "Unreleased"
        assert f"the version is {version}" in read("CHANGELOG.md")
    else:
        assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest)


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": "foredraft developers"}]
    assert citation["title"].startswith("foredraft")


def test_licences_are_there() -> None:
    project: dict[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]
    licences = project["license"].split(" AND ")
    assert licences[0] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30", (
        "the text as Apache publishes it"
    )
    readme = read("src/foredraft/zoo/tiny/README.md")
    for licence in re.findall(r"CC-BY-4\.0|CC0|BSD-3-Clause|MIT|PSF", readme):
        assert licence in read("NOTICE")
        assert any(name.startswith(licence) for name in licences), licence


def test_the_pages_beside_the_readme_lead_somewhere() -> None:
    for page in ("CONTRIBUTING.md", "CHANGELOG.md"):
        for target in targets(read(page)):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{page} -> {target}"


PUBLIC = {"foredraft", "foredraft.drafting", "foredraft.testing"}


def test_a_drafter_is_written_with_public_modules_alone() -> None:
    """Those behind them may move."""
    page = "\n".join(re.findall(r"```python\n(.*?)```", read("docs/add_a_drafter.md"), re.DOTALL))
    for text in (page, read("examples/echo_method/src/foredraft_echo.py")):
        assert set(re.findall(r"(?:from|import) (foredraft[\w.]*)", text)) <= PUBLIC
