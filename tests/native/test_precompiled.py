"""Kernels that a wheel has compiled: taken where they are whole and made from this package's sources, and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.folders import cache_folder
from foredraft.native import build, compiler
from foredraft.native import library as native
from fresh import forget_kernels

INSTRUCTION = native.instruction_set()

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")


class Wheel:
    """What a wheel has, made of the library that was compiled here."""

    def __init__(self, folder: Path) -> None:
        assert INSTRUCTION is not None
        self.folder, self.file = folder, folder / f"{INSTRUCTION.lower()}.so"
        folder.mkdir()
        with build.compiled("kernels", INSTRUCTION, compiler.SOURCES, compiler.HEADERS) as made:
            shutil.copyfile(made, self.file)
        self.say()

    def say(self, **changes: str) -> None:
        """Write what the library was made from."""
        made_from = build.library_digest(str(INSTRUCTION))
        made = {"made_from": made_from, "sha256": build.file_digest(self.file), **changes}
        notes = {"compiler": "zig", "glibc": "2.28", "libraries": {INSTRUCTION: made}}
        (self.folder / "libraries.json").write_text(json.dumps(notes))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheel]:
    """Nothing is loaded yet, nothing is kept, and there is no compiler."""
    made = Wheel(tmp_path / "precompiled")
    monkeypatch.setattr(build, "WHEEL", made.folder)
    forget_kernels(monkeypatch)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    build.why_not_precompiled.cache_clear()
    yield made
    build.why_not_precompiled.cache_clear()


def test_they_are_taken_without_a_compiler_and_nothing_is_kept(wheel: Wheel) -> None:
    found = native.library()
    assert found is not None
    assert (found.origin, found.instruction_set) == ("wheel", INSTRUCTION)
    assert not cache_folder("native").exists()


def keep(made: Path, kept: Path) -> None:
    """Put a library where libraries that were compiled here are kept, with its digest beside it."""
    kept.parent.mkdir(parents=True)
    shutil.copyfile(made, kept)
    kept.with_suffix(".sha256").write_text(build.file_digest(kept))


def test_they_come_before_what_was_compiled_here(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert INSTRUCTION is not None
    kept = cache_folder("native", f"kernels-{INSTRUCTION.lower()}-{build.library_digest(INSTRUCTION)}.so")
    keep(wheel.file, kept)
    found = native.library()
    assert found is not None
    assert found.origin == "wheel"
    wheel.file.unlink()
    build.why_not_precompiled.cache_clear()
    forget_kernels(monkeypatch)
    found = native.library()
    assert found is not None
    assert found.origin == "compiler"


def _sources_changed(wheel: Wheel) -> None:
    wheel.say(made_from="0123456789abcdef")


def _cut_off(wheel: Wheel) -> None:
    wheel.file.write_bytes(wheel.file.read_bytes()[:1000])


def _not_there(wheel: Wheel) -> None:
    shutil.rmtree(wheel.folder)


def _of_another_set(wheel: Wheel) -> None:
    (wheel.folder / "libraries.json").write_text('{"libraries": {}}')


def _unreadable(wheel: Wheel) -> None:
    (wheel.folder / "libraries.json").write_text("[")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_sources_changed, "the package's kernels were changed since its wheel was built"),
        (_cut_off, "so of the wheel is damaged; install it again"),
        (_not_there, "this installation has none"),
        (_of_another_set, "libraries of the wheel cannot be read"),
        (_unreadable, "libraries of the wheel cannot be read"),
    ],
)
def test_others_are_never_loaded_and_the_reason_is_told(
    wheel: Wheel, spoil: Callable[[Wheel], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(wheel)
    loaded: list[Any] = []
    monkeypatch.setattr(native, "Library", lambda *given: loaded.append(given))
    assert native.library() is None
    assert loaded == []
    assert reason in build.why_not_precompiled(str(INSTRUCTION))


def test_one_that_the_system_cannot_load_is_compiled_here(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made for a newer C library, say: it is whole, and the loader refuses it."""
    whole = wheel.file.read_bytes()
    wheel.file.write_bytes(b"\x7fELF of another kind")
    wheel.say()
    assert INSTRUCTION is not None
    made = wheel.folder.parent / "made.so"
    made.write_bytes(whole)
    kept = cache_folder("native", f"kernels-{INSTRUCTION.lower()}-{build.library_digest(INSTRUCTION)}.so")
    keep(made, kept)
    found = native.library()
    assert found is not None
    assert found.origin == "compiler"
