"""Libraries that are compiled once per machine: kept for every user, or for this process alone where they cannot be."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.folders import cache_folder
from foredraft.native import build as compiling
from foredraft.native import compiler

pytestmark = pytest.mark.skipif(
    compiling.cpp_compiler() is None or compiling.instruction_set() is None, reason="nothing is compiled here"
)


class Site:
    """A source, a cache and a folder for temporary files of its own."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "answer.cpp"
        self.source.write_text('extern "C" int answer() { return 42; }\n')
        self.cache, self.temporary = folder / "cache", folder / "temporary"
        self.temporary.mkdir()
        self.commands: list[tuple[str, ...]] = []

    def answer(self, title: str = "answer") -> int:
        with compiling.compiled(title, "AVX2", (self.source,)) as file:
            library = ctypes.CDLL(str(file))
        return int(library.answer())

    @property
    def library(self) -> Path:
        (file,) = cache_folder("native").glob("*.so")
        return file

    def left(self, folder: Path) -> list[str]:
        return sorted(file.name for file in folder.rglob("*") if not file.is_dir())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(made.cache))
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    run = compiler.run

    def counted(command: Any) -> None:
        made.commands.append(tuple(command))
        run(command)

    monkeypatch.setattr(compiler, "run", counted)
    yield made
    assert list(made.temporary.iterdir()) == []


def test_a_library_is_compiled_once_for_all_processes(site: Site) -> None:
    assert site.answer() == 42
    assert len(site.commands) == 2
    assert site.answer() == 42
    assert len(site.commands) == 2
    assert site.left(site.cache) == sorted([site.library.name, site.library.with_suffix(".sha256").name])


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_it_can_be_read_by_whom_new_files_can(site: Site, mask: int, mode: int) -> None:
    """They had 0711, so that every other user of a shared cache compiled again."""
    before = os.umask(mask)
    try:
        site.answer()
    finally:
        os.umask(before)
    for file in (site.library, site.library.with_suffix(".sha256")):
        assert stat.S_IMODE(file.stat().st_mode) == mode
    assert stat.S_IMODE(site.library.parent.stat().st_mode) == 0o777 & ~mask


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _forget_digest(file: Path) -> None:
    file.with_suffix(".sha256").unlink()


@pytest.mark.parametrize("damage", [_truncate, _change, _forget_digest])
def test_a_damaged_library_is_made_again_and_never_loaded(site: Site, damage: Any) -> None:
    """A process that maps a file which ends too early is killed by SIGBUS."""
    site.answer()
    whole = site.library.read_bytes()
    damage(site.library)
    assert site.answer() == 42
    assert len(site.commands) == 4
    assert site.library.read_bytes() == whole
    site.answer()
    assert len(site.commands) == 4


def _is_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    site.cache.write_text("in the way")
    return os.strerror(errno.ENOTDIR)


def _is_full(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    def copy(source: Path, target: Path) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", copy)
    return os.strerror(errno.ENOSPC)


def _is_read_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    opened = os.open

    def refuse(path: Any, flags: int, *others: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(site.cache)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *others, **more)

    def copy(source: Path, target: Path) -> None:
        os.close(os.open(target, os.O_CREAT))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(shutil, "copyfile", copy)
    return os.strerror(errno.EROFS)


def _belongs_to_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))

    monkeypatch.setattr(os, "replace", refuse)
    return os.strerror(errno.EPERM)


@pytest.mark.parametrize("spoil", [_is_file, _is_full, _is_read_only, _belongs_to_others])
def test_a_cache_that_cannot_be_used_is_named_once_and_nothing_is_left(
    site: Site, spoil: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every start left two folders among the temporary files, and said nothing."""
    reason = spoil(site, monkeypatch)
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert site.answer() == 42
        assert site.answer("question") == 42
    (said,) = caplog.messages
    assert f"cannot be kept in {site.cache / 'native'} ({reason})" in said
    assert "set FOREDRAFT_CACHE to a folder that can be written" in said
    assert site.left(site.cache) == []


def test_a_read_only_cache_that_holds_a_library_is_used(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.answer()
    _is_read_only(site, monkeypatch)
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert site.answer() == 42
    assert len(site.commands) == 2
    assert caplog.messages == []


def test_nothing_is_left_of_a_compiler_that_fails(site: Site) -> None:
    site.source.write_text("what is this")
    with pytest.raises(Exception, match="returned non-zero exit status"):
        site.answer()
    assert site.left(site.cache) == []


@pytest.mark.parametrize("given", ["", " ", "\t"])
def test_a_compiler_without_a_name_is_as_if_none_was_given(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an IndexError."""
    monkeypatch.delenv("CXX", raising=False)
    usual = compiling.cpp_compiler()
    monkeypatch.setenv("CXX", given)
    assert compiling.cpp_compiler() == usual


def test_the_options_of_a_compiler_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -O1")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compiling.cpp_compiler() == ["g++", "-O1"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiling.cpp_compiler() is None
