"""foredraft info without a model: what the machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import foredraft.native.build as build
import foredraft.native.library as native
from foredraft.cli import app
from foredraft.cli import info as machine

pytestmark = pytest.mark.usefixtures("_nothing_loads")


def run(*arguments: str) -> Any:
    found = CliRunner().invoke(app, ["info", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_machine_is_told_without_a_model() -> None:
    report = json.loads(run("--json"))
    assert report["kernels"] == (None if native.library() is None else report["machine"]["instruction_set"])
    assert (report["guarantee"]["kind"] == "bit-identical") == (report["kernels"] is not None)
    assert {"torch", "transformers"} <= report["versions"].keys()
    assert report["default_model"].startswith("zoo:")
    assert all(one.keys() == {"what", "why", "remedy"} for one in report["missing"])
    text = run()
    assert report["machine"]["cpu"].split()[0] in text
    assert "bit-identical" in text or "up to rounding" in text


@pytest.fixture
def machine_has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(instructions: str | None, compiler: list[str] | None, origin: str | None = None) -> None:
        why = "" if origin == "wheel" else "this installation has none"
        made = origin and SimpleNamespace(instruction_set="AVX2", origin=origin)
        monkeypatch.setattr(build, "instruction_set", lambda: instructions)
        monkeypatch.setattr(build, "cpp_compiler", lambda: compiler)
        monkeypatch.setattr(build, "why_not_precompiled", lambda instruction: why)
        monkeypatch.setattr(native, "library", lambda: made)

    return pretend


@pytest.mark.parametrize(
    ("instructions", "compiler", "remedy"),
    [
        ("AVX2", None, "install g++ or clang++, or set CXX to one"),
        ("AVX2", ["g++"], "install a newer g++ or clang++, or set CXX"),
        (None, ["g++"], "unset ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA"),
    ],
)
def test_missing_kernels_have_a_remedy(
    instructions: str | None, compiler: list[str] | None, remedy: str, machine_has: Callable[..., None]
) -> None:
    machine_has(instructions, compiler)
    report = json.loads(run("--json"))
    (kernels,) = [one for one in report["missing"] if one["what"] == "kernels"]
    assert kernels["remedy"].startswith(remedy)
    if instructions is not None:
        assert "install the wheel for this platform" in kernels["remedy"]
        assert kernels["why"].endswith("precompiled kernels: this installation has none")
    assert report["guarantee"]["kind"] == "up to rounding"
    assert report["kernels_from"] is None


@pytest.mark.parametrize(
    ("origin", "compiler", "told"),
    [
        ("wheel", None, "AVX2, precompiled in the wheel"),
        ("compiler", ["g++"], "AVX2, compiled on this machine; precompiled kernels: this installation has none"),
    ],
)
def test_it_is_told_where_kernels_come_from(
    origin: str, compiler: list[str] | None, told: str, machine_has: Callable[..., None]
) -> None:
    """Without a compiler they may come with the wheel; what it would do besides is missing, and has a remedy."""
    machine_has("AVX2", compiler, origin)
    report = json.loads(run("--json"))
    assert (report["kernels"], report["kernels_from"]) == ("AVX2", origin)
    assert report["guarantee"]["kind"] == "bit-identical"
    missing = {one["what"]: one["remedy"] for one in report["missing"]}
    assert "kernels" not in missing
    assert missing.get("compiler") == (None if compiler else "install g++ or clang++, or set CXX to one")
    assert told in " ".join(run().split())


def test_a_missing_package_and_cache_have_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no chmod stops root
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "kept"))
    missing = {one["what"]: one["remedy"] for one in json.loads(run("--json"))["missing"]}
    assert missing["gguf"] == "python -m pip install 'gguf>=0.17.1'"
    assert missing["ray"].endswith("'ray[serve]>=2.60' 'uvicorn>=0.34'")  # with those of the extra that it contains
    assert missing["cache"] == "set FOREDRAFT_CACHE to a writable folder"
    assert "ray[serve]" in run()  # not taken as markup
