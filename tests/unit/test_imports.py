"""The rooms of the program and the direction of its imports, downwards only and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

LAYERS = (
    ("errors",),
    ("beginnings", "devices", "ending", "extras", "folders", "forking", "machine", "progress"),
    ("pictures",),
    ("native",),
    ("config",),
    ("tree",),
    ("structured",),
    ("sampling",),
    ("prompts",),
    ("model",),
    ("heads",),
    ("accept",),
    ("engine",),
    ("retrieval", "gguf"),
    ("zoo",),
    ("methods",),
    ("drafters",),
    ("loading", "drafting"),
    ("llm", "hf", "classic"),
    ("testing", "views"),
    ("bench",),
    ("tune", "train", "serve", "verify"),
    ("cli",),
    ("__main__",),
)
"""Rooms and files of the package from the ground up. A room imports from lower layers only."""


TRIED_OUT = "foredraft.model.lm", {"foredraft.model.prober", "foredraft.model.reduced"}
"""An adapter, and what it is tried out by when it is made, whose functions take it: the one circle of types."""
TYPES_FROM_ABOVE = {
    "foredraft.accept": {"foredraft.engine.row"},
    "foredraft.beginnings": {"foredraft.model.cache.ragged"},
    "foredraft.methods": {"foredraft.drafters.context", "foredraft.engine.drafter"},
}
"""Who names types from above: acceptance reads rows, a beginning says whose keys it holds, a method what it is built
from and into what."""

REGISTRY = {"foredraft.config.speculative": {"foredraft.methods"}}
"""Who looks something up above: the config of drafting finds methods by name, families of which it knows none of."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in (SOURCE / "foredraft").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str, with_types: bool = False) -> frozenset[str]:
    """Modules of the package that one imports, when it is loaded or later.

    Args:
      with_types: also those that only type checkers see.
    """
    path = modules()[module]
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = _imported(ast.parse(path.read_text(encoding="utf-8")).body, folder, with_types)
    return frozenset(found) - {module, "foredraft"}


def _imported(nodes: list[ast.AST] | list[ast.stmt], folder: str = "", with_types: bool = False) -> Iterator[str]:
    for node in nodes:
        names: list[str | None] = []
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not with_types:
            yield from _imported(node.orelse, folder)
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = folder.split(".")[: len(folder.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            members = [f"{source}.{alias.name}" for alias in node.names]
            names = [member if member in modules() else source for member in members]
        yield from (name for name in names if name in modules())
        yield from _imported(list(ast.iter_child_nodes(node)), folder, with_types)


def room(module: str) -> str:
    return module.split(".")[1]


def layer(name: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if name in rooms)


def test_every_room_has_its_layer() -> None:
    assert {room(module) for module in modules() if module != "foredraft"} == {
        name for rooms in LAYERS for name in rooms
    }


@pytest.mark.parametrize("name", [name for rooms in LAYERS for name in rooms])
def test_imports_point_downwards(name: str) -> None:
    for module in modules():
        if module != "foredraft" and room(module) == name:
            below = imports(module, with_types=True) - TYPES_FROM_ABOVE.get(module, set()) | imports(module)
            below -= REGISTRY.get(module, set())
            upwards = [other for other in below if room(other) != name and layer(room(other)) >= layer(name)]
            assert not upwards, f"{module} imports {upwards}, which must not lie beside or above it"


def test_no_file_imports_itself_in_a_circle() -> None:
    """When it runs or for its types."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            others = imports(module, with_types=True)
            if module in TRIED_OUT[1]:
                others -= {TRIED_OUT[0]} - imports(module)
            for other in sorted(others):
                visit(other, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_an_import_upwards_would_show() -> None:
    """The control: what a type checker alone sees is left out, what runs later is not."""
    code = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from foredraft.llm import LLM\nelse:\n    from foredraft.model import lm\n"
        "def f():\n    from foredraft.cli import app\n    from foredraft.engine import stats\n"
    )
    assert set(_imported(ast.parse(code).body)) == {"foredraft.model.lm", "foredraft.cli", "foredraft.engine.stats"}
    relative = ast.parse("from .candidates import Parents\nfrom ..lm import draft_model\nfrom .. import heads\n")
    names = {"parts.candidates", "lm.draft_model", "heads"}
    assert set(_imported(relative.body, "foredraft.drafters.parts")) == {f"foredraft.drafters.{one}" for one in names}
