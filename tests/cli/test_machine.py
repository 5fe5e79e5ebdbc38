"""foretoken info without a model: what the machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import foretoken.native.build as build
import foretoken.native.library as native
from foretoken.cli import app, machine


def run(*arguments: str) -> Any:
    found = CliRunner().invoke(app, ["info", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.llm.load_model", lambda *_, **__: pytest.fail("a model was loaded"))


def test_the_machine_is_told_without_a_model() -> None:
    report = json.loads(run("--json"))
    assert report["kernels"] == (None if native.library() is None else report["machine"]["instruction_set"])
    assert (report["promise"]["kind"] == "native") == (report["kernels"] is not None)
    assert {"torch", "transformers"} <= report["versions"].keys()
    assert report["default_model"].startswith("zoo:")
    assert all(one.keys() == {"what", "why", "remedy"} for one in report["missing"])
    text = run()
    assert report["machine"]["cpu"].split()[0] in text
    assert "native" in text or "near-ties" in text


@pytest.mark.parametrize(
    ("instructions", "compiler", "remedy"),
    [
        ("AVX2", None, "install g++ or clang++, or set CXX to one"),
        ("AVX2", ["g++"], "install a newer g++ or clang++, or set CXX"),
        (None, ["g++"], "unset ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA"),
    ],
)
def test_missing_kernels_have_a_remedy(
    instructions: str | None, compiler: list[str] | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "instruction_set", lambda: instructions)
    monkeypatch.setattr(build, "cpp_compiler", lambda: compiler)
    monkeypatch.setattr(native, "library", lambda: None)
    report = json.loads(run("--json"))
    (kernels,) = [one for one in report["missing"] if one["what"] == "kernels"]
    assert kernels["remedy"].startswith(remedy)
    assert report["promise"]["kind"] == "near-ties"


def test_a_missing_package_and_cache_have_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "_is_writable", lambda folder: False)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "kept"))
    missing = {one["what"]: one["remedy"] for one in json.loads(run("--json"))["missing"]}
    assert missing["gguf"] == "python -m pip install 'foretoken[gguf]'"
    assert missing["cache"] == "set FORETOKEN_CACHE to a folder that can be written"
    assert "[gguf]" in run()  # not taken as markup
