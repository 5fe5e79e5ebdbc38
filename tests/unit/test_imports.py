"""The rooms of the program and the direction of its imports, downwards only and never in a circle; no file too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

LAYERS = (
    ("errors",),
    ("beginnings", "ending", "lazy", "folders", "forking", "machine", "progress"),
    ("native",),
    ("tree", "config"),
    ("structured",),
    ("law",),
    ("accept",),
    ("model",),
    ("heads",),
    ("engine",),
    ("retrieval", "gguf"),
    ("zoo",),
    ("drafters",),
    ("loading", "sessions"),
    ("llm", "hf", "classic"),
    ("testing", "views"),
    ("bench",),
    ("tune", "train", "serve", "verify", "report"),
    ("cli",),
    ("__main__",),
)
"""Rooms and files of the package from the ground up. A room imports from lower layers only. The methods of drafting
are found by name (`foredraft.config.method`), so that config knows none of them."""


TRIED_OUT = "foredraft.model.lm", {"foredraft.model.prober", "foredraft.model.reduced"}
"""An adapter, and what it is tried out by when it is made, whose functions take it: the one circle of types."""
TYPES_FROM_ABOVE = {
    "foredraft.beginnings": {"foredraft.model.cache.ragged"},
    "foredraft.config.method": {"foredraft.drafters.context", "foredraft.engine.drafter"},
}
"""Who names types from above: a beginning says whose keys it holds, a method what it is built from and into what."""

MAX_LINES = 300
LONGER = {
    "bench/forwards.py": "recording forwards, replaying them, and what lies around them: one measurement",
    "bench/outcome.py": "one comparison: its rows, what is shown of them, and what follows",
    "bench/parts.py": "the suite is one class: arms over a pair of models, and the parts in which they meet",
    "cli/bench.py": "one verb with its three benchmarks and what they tell meanwhile",
    "config/method.py": "what a method is, where methods are found, and what a folder holds of one",
    "drafters/iterate/lookahead.py": "one method: its window, what the window is worth, and its pool",
    "drafters/lengths.py": "seven policies of a few lines each, with their contract and formulas",
    "engine/acceptance_model.py": "one model with the rates that it is made of",
    "engine/cost_model.py": "one model with the curve that it begins with and what it learns of it",
    "engine/costs.py": "forwards that are timed, and what is kept of that",
    "engine/governor.py": "one decision per step: how deep, how wide, what of it, and what is learned of that",
    "drafters/parts/eagle_rows.py": "one owner of a head's rows: entries of the text, and nodes, by kernels or modules",
    "drafters/parts/growth.py": "the one builder of trees: what it is told, and the four verbs of a level",
    "heads/medusa_hydra_layouts.py": "one family of layouts, with what reading them has in common",
    "model/execution/packing.py": "one product of layers, over whatever its weights are packed for",
    "llm.py": "the front door is one class: what it is made from, and every way to call it",
    "engine/scheduler.py": "one scheduler: who waits, who reads which chunk, and who decodes",
    "model/execution/ends.py": "one trace of what lies around the layers, and its parts",
    "model/execution/execution.py": "one way in: what is packed, recorded and compiled of a shadow, and why not",
    "model/execution/lowering.py": "one pass over a graph: where numbers lie, and what each operator becomes",
    "model/execution/native_program.py": "one program: its tables, its memory, and the calls that run it",
    "model/execution/tracing.py": "one layer as a graph and as a program, and what a trace is made with",
    "model/lm.py": "the adapter is one class: made from a model, following its changes, and the one way in",
    "cli/chat.py": "one verb: its commands, and the terminal or pipe that it reads and writes",
    "cli/generate.py": "one verb: to a terminal, or as a job into a file that goes on",
    "cli/info.py": "one verb: what a model is, and what the machine has where none is named",
    "loading/models.py": "one way in: from a name to a model in memory, its structure and its tokenizer",
    "loading/packed_copy.py": "one copy: what is kept of a packed model, where, and the same model again",
    "retrieval/build.py": "one build: texts or tokens become shards, and what is interrupted goes on",
    "serve/answering.py": "one answer: its exchange, its events, and what it tells of itself",
    "serve/responses.py": "one endpoint: what it asks for, and the events and items of its answers",
    "serve/tools.py": "calls of functions: what may be called, and how calls are read from a text",
    "testing/conformance.py": "the properties of a drafter, and the checked runs that show them",
    "train/run.py": "one training: its steps, its measurements, and what it leaves",
    "tune/layer_sets.py": "one search: its space, its trials, and what it found",
    "verify/subjects.py": "what is judged: one subject each for this library, transformers, functions and servers",
    "verify/verifying.py": "one judgement, from what is asked to the verdict",
    "views/trajectory.py": "one trajectory: how it is decoded, and as data, text and a page",
    "accept/rules.py": "the four rules, and the noise that two of them draw with",
    "drafters/parts/rank_tree.py": "one kind of tree, and the published ones, which are data",
    "engine/budget.py": "what may be drafted, what of it is verified, and what every limit has cut",
    "heads/eagle_layouts.py": "one family of layouts, and the structure that is read off its tensors",
    "model/prober.py": "one probe: what it asks, and its findings as data",
    "model/reference.py": "what one probe compares: steps, faults, and plain forwards of their texts",
    "native/packed_matmul.py": "one matrix by weight format: how it lies, its products, and the same one again",
    "sessions/runner.py": "one engine shared by calls, and the stream that each of them holds",
    "sessions/session.py": "the requests of one call and their texts",
    "zoo/conversion.py": "one conversion: whether it is there and whole, and how it is made",
}
"""Files that may have more lines, and why."""


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
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Lazy":
            names = [ast.literal_eval(node.args[0])]
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


def test_no_file_is_long_without_a_reason() -> None:
    lengths = {
        path.relative_to(SOURCE / "foredraft").as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules().values()
    }
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES and name not in LONGER}
    assert not too_long, f"split by what they are responsible for, or say in LONGER why not: {too_long}"
    needless = [name for name in LONGER if lengths.get(name, 0) <= MAX_LINES]
    assert not needless, f"they are short enough now; take them out of LONGER: {needless}"


def test_an_import_upwards_would_show() -> None:
    """The control: what a type checker alone sees is left out, what runs later is not."""
    code = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from foredraft.llm import LLM\nelse:\n    lm = Lazy('foredraft.model.lm')\n"
        "def f():\n    from foredraft.cli import app\n    from foredraft.engine import stats\n"
    )
    assert set(_imported(ast.parse(code).body)) == {"foredraft.model.lm", "foredraft.cli", "foredraft.engine.stats"}
    relative = ast.parse("from .protocol import Answer\nfrom ..client import Worker\nfrom .. import race\n")
    names = {"workers.protocol", "client", "race"}
    assert set(_imported(relative.body, "foredraft.bench.peers.workers")) == {
        f"foredraft.bench.peers.{one}" for one in names
    }
