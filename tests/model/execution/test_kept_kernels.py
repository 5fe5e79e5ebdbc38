"""Kernels that inductor keeps: only those that were left, for this machine, by a process that came to its end."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_models import build
from foredraft import machine
from foredraft.folders import cache_folder, locked
from foredraft.model.execution import compiled_layers, inductor
from foredraft.model.execution.inductor import LISTING, folder_name, whole
from foredraft.model.lm import CausalLM
from foredraft.native import build as compiling
from fresh import forget_compiled_layers


def leave(folder: Path, **files: str) -> None:
    with whole(folder) as inside:
        for name, text in files.items():
            (inside / "deep").mkdir(exist_ok=True)
            (inside / "deep" / name).write_text(text)


def left(folder: Path) -> list[str]:
    with whole(folder) as inside:
        return sorted(file.name for file in inside.rglob("*") if file.is_file() and file.name != LISTING)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "avx2"
    leave(made, one="kernel", two="kernel")
    assert left(made) == ["one", "two"]
    return made


def _change(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "deep" / "one").write_text(text)


def _list(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / LISTING).write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        *map(_change, ("", "kern", "kernels")),
        lambda folder: (folder / "three").write_text("ker"),
        lambda folder: (folder / "deep" / "one").unlink(),
        *map(_list, ("", "[]", "{", "null", json.dumps({"deep/one": "0"}))),
    ],
)
def test_what_is_not_as_it_was_left_takes_all_with_it(folder: Path, spoil: Callable[[Path], object]) -> None:
    """A file that was changed, is missing, or that nobody finished; and a listing that is not one."""
    spoil(folder)
    assert left(folder) == []
    leave(folder, one="kernel")
    assert left(folder) == ["one"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_was_there_stays_where_something_new_fails(folder: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with whole(folder):
            (folder / "deep" / "three").write_text("ker")
            raise error

    with pytest.raises(error):
        fail()
    assert left(folder) == ["one", "two"]


def test_who_cannot_get_in_has_a_copy_and_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "LONGEST_WAIT", 0.01)
    with locked(folder.with_name(f".{folder.name}.lock"), 1.0) as is_alone, whole(folder) as other:
        assert is_alone
        assert other != folder
        assert (other / "deep" / "one").read_text() == "kernel"
        (other / "three").write_text("kernel")
    assert not other.exists()
    assert left(folder) == ["one", "two"]


def test_a_folder_is_of_one_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {folder_name()}
    machine.cpu_digest.cache_clear()
    flags = machine.cpu_fact("flags") or "none"
    with monkeypatch.context() as patch:
        patch.setattr(machine, "cpu_fact", lambda key: f"{flags} amx_tile" if key == "flags" else None)
        found.add(folder_name())
    machine.cpu_digest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "abacus")
        found.add(folder_name())
    machine.cpu_digest.cache_clear()
    monkeypatch.setenv("CXX", f"{shutil.which('true')} -x")
    found.add(folder_name())
    assert len(found) == 4


needs_a_compiler = pytest.mark.skipif(compiling.cpp_compiler() is None, reason="nothing is compiled here")


@needs_a_compiler
def test_layers_are_compiled_inside_of_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load half of a library killed the process, and an empty one left the layers uncompiled at every start."""
    monkeypatch.setattr(compiled_layers, "cache_folder", tmp_path.joinpath)
    leave(kept := tmp_path / "inductor" / folder_name(), one="library", two="library")
    seen = []

    def compile_nothing(tracer: Any, folder: Path, num_threads: int) -> None:
        seen.append((folder, sorted(file.name for file in (folder / "deep").glob("*"))))
        (folder / "three").write_text("library")

    monkeypatch.setattr(compiled_layers.LayerGraph, "of", compile_nothing)
    model = build("llama")
    for text in ("library", "lib", ""):
        if (kept / "deep").exists():
            (kept / "deep" / "one").write_text(text)
        forget_compiled_layers(monkeypatch)
        CausalLM(model, execution="compiled", probe=False).execution.make_ready()
        assert "three" in left(kept)
    assert seen == [(kept, ["one", "two"]), (kept, []), (kept, [])]


KERNELS = """
import sys
sys.path.insert(0, sys.argv[1])
from compiled_models import build
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes

lm = CausalLM(build("llama"), execution="compiled", probe=False)
lm.execution.make_ready()
print(lm.execution.num_compiled, lm.forward(Nodes.from_chains([[3, 4, 5]]), lm.new_cache(1)).sum().item())
"""


@pytest.mark.full
@needs_a_compiler
def test_libraries_that_end_too_early_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor, in processes of their own."""
    for part in ("native", "inductor"):  # those take longer to compile, and these other tests have compiled
        if cache_folder(part).exists():
            shutil.copytree(cache_folder(part), tmp_path / part)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    command = [sys.executable, "-c", KERNELS, str(Path(__file__).parents[2] / "support")]
    first = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert first.split()[0] == "2"
    libraries = [*(tmp_path / "inductor").rglob("*.so")]
    assert len(libraries) > 1
    for number, library in enumerate(libraries):
        content = library.read_bytes()
        library.write_bytes(content[: len(content) // 2] if number else b"")
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == first
    assert all(library.stat().st_size for library in (tmp_path / "inductor").rglob("*.so"))
