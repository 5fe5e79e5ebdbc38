"""docs/architecture.md is true: its files and names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "foredraft"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_of(path: Path) -> set[str]:
    """Classes and functions of a file, methods included."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?<![\w/])[\w*/]+\.py\b", PAGE))))
def test_files_exist(path: str) -> None:
    found = [*SOURCE.glob(path), *ROOT.glob(path)] if "/" in path else list(SOURCE.rglob(path))
    assert found, f"docs/architecture.md names {path}"


def test_owners_are_defined_where_the_page_says() -> None:
    places = re.findall(r"`(\w+)`, `([\w/]+\.py)`", section("Who owns what"))
    assert len(places) == 5
    assert [(name, path) for name, path in places if name not in names_of(SOURCE / path)] == []
