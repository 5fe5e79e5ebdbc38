"""How large the house is, and how much of it a prompt walks through: files, lines, classes, functions, words.

    python dev/house.py                                     # of this checkout, without running anything
    python dev/house.py --way ngram eagle3 [--model zoo:smollm2] [--files] [--json]

A way is that of a second ``LLM.generate`` of one prompt, when all is loaded, compiled and seen: the Python files of
foredraft in which a function is called, in any thread, with their whole lengths, and the calls. It takes no times: any
machine will do. Lines are all lines; words of documents are split at white space, tables and code included. The way is
that of the foredraft that is imported: with another checkout first on PYTHONPATH, and ``--root``, that one is counted.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import statistics
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT = "Name the days of the week, then name them again in the same order."
NUM_TOKENS = 48


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


def counted(root: Path) -> dict[str, Any]:
    """Figures of a checkout, from its files alone."""
    source = root / "src" / "foredraft"
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in python_files(source)]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    names = Counter(node.name for node in classes)
    native = [file for kind in ("*.cpp", "*.h", "*.hpp") for file in source.rglob(kind)]
    figures: dict[str, Any] = {}
    for name, files in (
        ("source", python_files(source)), ("C++", native), ("tests", python_files(root / "tests")),
        ("benchmarks", python_files(root / "benchmarks")), ("examples", python_files(root / "examples")),
    ):  # fmt: skip
        figures[name] = {"files": len(files), "lines": sum(map(lines_of, files))}
    figures["rooms"] = {
        room.name: sum(map(lines_of, python_files(room) if room.is_dir() else [room]))
        for room in sorted(source.iterdir())
        if room.suffix == ".py" or (room.is_dir() and python_files(room))
    }
    figures["classes"] = {"number": len(classes), "names that stand twice": sum(n > 1 for n in names.values())}
    figures["functions"] = {
        "number": len(functions), "median lines": statistics.median(lengths), "of 40 lines and more": sum(
            length >= 40 for length in lengths
        ),
    }  # fmt: skip
    docs, dev = [root / "README.md", *(root / "docs").rglob("*.md")], list((root / "dev").rglob("*.md"))
    for name, pages in (("docs", docs), ("dev", dev)):
        words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
        figures[name] = {"pages": len(pages), "words": words}
    return figures


# -- the way of a prompt -----------------------------------------------------------------------------------------------


class Footprints:
    """Notes in which files of a package a function is called, as long as the block runs, in this thread and new ones.

    Bodies of modules and classes are no functions.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.calls: Counter[str] = Counter()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._counts(frame.f_code):
            self.calls[frame.f_code.co_filename] += 1

    def _counts(self, code: CodeType) -> bool:
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(self._package)

    def __enter__(self) -> Footprints:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def way(model: str, dtype: str, method: str) -> dict[str, Any]:
    """What a second call walks through, in a process that has done nothing else."""
    import foredraft
    from foredraft import LLM, SamplingParams

    package = Path(foredraft.__file__).parent
    llm = LLM(model, method, dtype=dtype)
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (first,) = llm.generate(prompt, params, use_tqdm=False)
    with Footprints(package) as found:
        (second,) = llm.generate(prompt, params, use_tqdm=False)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    counts = second.metrics.speculative_decoding
    lengths = {file: lines_of(Path(file)) for file in found.calls}
    return {
        "files": len(lengths), "lines": sum(lengths.values()), "calls": found.calls.total(),
        "steps": counts["num_steps"], "accepted": counts["num_accepted_draft_tokens"],
        "by_file": {
            str(Path(file).relative_to(package)): [length, found.calls[file]]
            for file, length in sorted(lengths.items())
        },
    }  # fmt: skip


def ways(options: argparse.Namespace) -> dict[str, Any]:
    """Of every method, each in a process of its own: what one has measured, another would not walk through."""
    found = {}
    for method in options.way:
        command = [sys.executable, __file__, "--alone", "--way", method, "--model", options.model]
        done = subprocess.run([*command, "--dtype", options.dtype], stdout=subprocess.PIPE, text=True, check=True)
        found[method] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout")
    parser.add_argument("--way", nargs="*", default=[], metavar="METHOD")
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--files", action="store_true", help="name the files of a way, with their lines and calls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(way(options.model, options.dtype, *options.way)))
        return
    figures = counted(options.root)
    if options.way:
        figures["ways"] = ways(options)
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, found in figures.items():
        if name != "ways":
            print(f"{name:11} {', '.join(f'{what} {number:,}' for what, number in found.items())}")
    for method, found in figures.get("ways", {}).items():
        files, lines, calls = (found[name] for name in ("files", "lines", "calls"))
        what = f"{found['steps']} steps, {found['accepted']} accepted"
        print(f"way of {method}: {files} files, {lines:,} lines, {calls:,} calls ({what})")
        for file, (length, number) in found["by_file"].items() if options.files else ():
            print(f"  {file:44} {length:4} lines {number:7,} calls")


if __name__ == "__main__":
    main()
