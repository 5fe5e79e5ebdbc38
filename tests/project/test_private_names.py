"""Tests use public names of the package. Exceptions are listed with their reasons, and the list contains no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
SOURCES = [*TESTS.parent.glob("src/foredraft/**/*.py"), *TESTS.parent.glob("benchmarks/**/*.py")]

ALLOWED = {
    "drafters/heads/test_medusa_hydra.py": {
        "_take_in": "a fault that gives rows each other's states, behind every way in which states arrive",
    },
    "drafters/lookup/test_suffix.py": {
        "_link": "the cost of the automaton is the number of links followed, which nothing public counts",
    },
    "drafters/test_method_mutations.py": {
        "_split": "a fault inside the automaton: strings that end in other places share a state",
    },
    "engine/test_host_work.py": {
        "_prefixed": "forward pass of a prefix layer, whose work is not counted",
        "_run": "forward pass of an EAGLE head with its mask, whose work is not counted",
    },
    "model/test_flat_nodes.py": {
        "_lists_all": "a single row runs as a list only with kernels, and this test is in float64, without them",
        "_takes_lists": "the same model as a rectangle is the reference for lists of nodes",
    },
    "serve/test_fair.py": {
        "_served": "memory of a queue is bounded by its number of counters, which nobody else needs",
    },
    "serve/test_serve_refusals.py": {
        "_socket": "a server that never runs leaves the socket that it was bound to",
    },
    "support/engines.py": {
        "_runner": "the engine of an LLM is not part of its interface",
    },
    "support/fresh.py": {
        "_forms": "process-wide store; a test starts like a new process",
        "_graphs": "process-wide store; a test starts like a new process",
        "_libraries": "process-wide store; a test starts like a new process",
        "_programs": "process-wide store; a test starts like a new process",
    },
    "test_llm.py": {
        "_prepared": "what a hook has learned from earlier calls is not part of its interface",
    },
}
"""Private names that tests use: file, name, reason. An entry leaves the list with its last use."""

NAMING = {"setattr", "getattr", "delattr", "hasattr", "object", "patch"} | {
    "wrapped",
    "with_arguments",
    "with_result",
    "replaced",
    "skipped",
    "only_once",
}
"""Functions whose first two arguments may name an attribute in a string."""


PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
DEFINITION = re.compile(r"(?:def |class |self\.|cls\.|^ *)(_[A-Za-z]\w*)", re.MULTILINE)
"""A private name where modules define one: functions, classes, variables, and attributes of ``self`` and ``cls``."""


def defined(tree: ast.AST) -> set[str]:
    """Names that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name_of(node.value) in OWNERS:
            names.add(node.attr)
    return names


OWNERS = {"self", "cls"}


def used(tree: ast.AST) -> Iterator[str]:
    """Names that a module reads from others: attributes, imports, and strings that name an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "torch":
            yield from (part for name in node.names for part in (name.name, *(node.module or "").split(".")))
        elif isinstance(node, ast.Call) and _name_of(node.func) in NAMING:
            named = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
            yield from (part for each in named if isinstance(each, str) for part in each.split("."))


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def private_names(source: str, of_package: set[str]) -> set[str]:
    """Private names of the package that a test module uses and does not define itself."""
    mentioned = of_package.intersection(PRIVATE.findall(source))
    if not mentioned:
        return set()
    tree = ast.parse(source)
    return mentioned.intersection(used(tree)) - defined(tree)


def test_tests_use_no_private_name_that_is_not_listed_and_every_listed_name_is_used() -> None:
    of_package = set().union(*(DEFINITION.findall(file.read_text(encoding="utf-8")) for file in SOURCES))
    of_package -= vars(nn.Module()).keys()
    found = {
        file.relative_to(TESTS).as_posix(): names
        for file in TESTS.rglob("*.py")
        if (names := private_names(file.read_text(encoding="utf-8"), of_package))
    }
    assert found == {file: set(names) for file, names in ALLOWED.items()}, (
        "test through a public name, or list the private one with the reason why there is none"
    )
    assert all(reason for names in ALLOWED.values() for reason in names.values())


@pytest.mark.parametrize(
    "source",
    [
        "drafter._cache.lengths",
        "self._cache",
        "cache._cache = 3",
        "from foredraft.model.cache import _cache",
        'monkeypatch.setattr(drafter, "_cache", None)',
        'monkeypatch.setattr("foredraft.model._cache", None)',
        'getattr(drafter, "_cache")',
        'skipped(Drafter, "_cache")(patch)',
    ],
)
def test_every_way_to_use_a_private_name_is_found(source: str) -> None:
    assert private_names(source, {"_cache"}) == {"_cache"}
    assert private_names(source, {"_other"}) == set()


def test_names_of_the_test_itself_are_not_counted() -> None:
    assert private_names("class Own:\n    def __init__(self): self._cache = 3\nOwn()._cache", {"_cache"}) == set()
