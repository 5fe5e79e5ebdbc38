"""Wheel and source distribution hold everything they need; the wheel speaks from an empty directory."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
for build in (build_wheel, build_sdist)[: int(sys.argv[2])]:
    build(sys.argv[1])
"""


def build(source: Path, out: Path, num_kinds: int = 2) -> Path:
    """A wheel, and a source distribution."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out), str(num_kinds)], cwd=source, check=True)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    return build(ROOT, tmp_path_factory.mktemp("dist") / "built")


def wheel_of(folder: Path) -> zipfile.ZipFile:
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def in_the_checkout(folder: str) -> set[str]:
    """Files below a folder, without what interpreters leave there."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.full
@pytest.mark.slow
def test_the_wheel_works_from_an_empty_directory(built: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    for directory in (site, empty):
        directory.mkdir()
    names = wheel_of(built).namelist()
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "training", "docs", "hatch_build"))]
    assert "foredraft/py.typed" in names
    wheel_of(built).extractall(site)
    code = "import sys, foredraft; sys.stderr.write(foredraft.__file__); from foredraft.cli import main; main()"
    arguments = ["generate", "Once upon a time", "--model", "zoo:tiny", "--max-new-tokens", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=empty,
        env={"PYTHONPATH": str(site), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr
    assert json.loads(done.stdout)["num_generated_tokens"] == 8


@pytest.mark.full
def test_both_hold_the_licence_and_the_models(built: Path) -> None:
    """There was no LICENSE file at all."""
    names = set(wheel_of(built).namelist())
    (licences,) = {name.partition(".dist-info/")[0] + ".dist-info/licenses/" for name in names if ".dist-info/" in name}
    assert {licences + "LICENSE", licences + "NOTICE"} <= names
    models = in_the_checkout("src/foredraft/zoo")
    assert "src/foredraft/zoo/tiny/target/model.safetensors" in models
    assert {name.removeprefix("src/") for name in models} <= names
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    pages = in_the_checkout("docs")
    assert pages | models | {"LICENSE", "NOTICE", "README.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile"} <= packed
    assert not [name for name in packed if name.startswith((".venv", ".cache", ".git/", ".whl"))]


@pytest.mark.full
@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    again = build(next(tmp_path.iterdir()), tmp_path / "again", 1)
    first, second = wheel_of(built), wheel_of(again)
    assert sorted(first.namelist()) == sorted(second.namelist())
    (metadata,) = (name for name in first.namelist() if name.endswith("METADATA"))
    assert first.read(metadata) == second.read(metadata)
    shown = email.message_from_bytes(first.read(metadata))
    assert shown["Author"] == "foredraft developers"
    assert "](docs/" not in str(shown.get_payload())
