"""The race against other engines: how it starts them, and what it says where they are missing."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("race")


def options(tmp_path: Path, dtype: str, **changes: object) -> argparse.Namespace:
    given = {
        "model": str(tmp_path),
        "dtype": dtype,
        "envs": tmp_path / "envs",
        "engines": None,
        "dense": False,
        "max_new_tokens": 8,
        "assisted_lengths": None,
        "lookup_lengths": None,
        "limit": 2,
    }
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("dtype", "weights", "precision", "kind"), [("bfloat16", "fp16", "bf16", "bf16"), ("float32", "fp32", "f32", "f32")]
)
def test_every_engine_computes_in_the_dtype_that_is_asked_for(
    race: ModuleType, tmp_path: Path, dtype: str, weights: str, precision: str, kind: str
) -> None:
    for name in ("openvino", "llamacpp"):
        python = tmp_path / "envs" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    ours, openvino, llama, half = race.launches(options(tmp_path, dtype), tmp_path)
    assert f"--dtype={dtype}" in ours.arguments
    assert ours.python == Path(sys.executable)
    assert openvino.arguments[-4:] == ("--weights", weights, "--precision", precision)
    assert llama.arguments[-2:] == ("--type", kind)
    assert half.arguments[-2:] == ("--type", "f16")


def test_a_missing_environment_names_the_command_that_builds_it(race: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"build_peers\.py --envs"):
        race.launches(options(tmp_path, "float32"), tmp_path)
    assert [
        launch.script for launch in race.launches(options(tmp_path, "float32", engines=["foretoken"]), tmp_path)
    ] == ["foretoken_worker.py"]


def test_what_was_exported_is_raced_and_a_model_is_exported_first(
    race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path]] = []
    monkeypatch.setattr(race, "EXPORTS", tmp_path / "runs")
    monkeypatch.setattr(race, "export", lambda model, folder, **settings: calls.append((model, folder)))
    wanted = options(tmp_path, "float32", model="zoo:smollm2")
    folder = race.exported(wanted)
    assert calls == [("zoo:smollm2", folder)]
    assert folder.parent == tmp_path / "runs"
    folder.mkdir(parents=True)
    (folder / "prompts.json").write_text("[]")
    assert race.exported(wanted) == folder
    assert race.exported(options(tmp_path, "float32", model=str(folder))) == folder
    assert len(calls) == 1


def test_ends_of_text_are_those_of_the_checkpoint(race: ModuleType, tmp_path: Path) -> None:
    protocol = importlib.import_module("peers.protocol")
    (tmp_path / "target").mkdir()
    assert protocol.eos_token_ids(tmp_path) == set()
    for eos, expected in ((2, {2}), ([0, 3], {0, 3}), (None, set())):
        (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert protocol.eos_token_ids(tmp_path) == expected
    assert not protocol.has_draft(tmp_path)
