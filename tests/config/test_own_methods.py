"""A method is its options and what builds its drafter, here or in another package that is installed beside this one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_wheel import build, wheel_of

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.methods import lookup, methods
from foredraft.model.lm import CausalLM
from foredraft.testing import check_drafter, toy_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "echo_method"
FILE = EXAMPLE / "src" / "foredraft_echo.py"


def run(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *sys.path])
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_package_adds_a_method_by_its_entry_point(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    wheel_of(build(EXAMPLE, tmp_path / "built", 1)).extractall(tmp_path / "site")
    keys = run(tmp_path / "site", "-m", "foredraft", "info", "--keys", "--method", "repeat_after", "--json")
    assert keys.returncode == 0, keys.stderr
    assert {name: value for name, value in json.loads(keys.stdout.splitlines()[0]).items() if name != "meaning"} == {
        "key": "echo_distance",
        "values": "whole number, 1 or more",
        "defaults": {"echo": 4},
    }
    arguments = ("generate", "One, two, one, two,", "--model", "zoo:tiny", "--max-new-tokens", "12", "--json")
    done = run(tmp_path / "site", "-m", "foredraft", *arguments, "--speculative-config", '{"echo_distance": 2}')
    assert done.returncode == 0, done.stderr
    plain = LLM("zoo:tiny").generate(arguments[1], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert json.loads(done.stdout)["token_ids"] == list(plain.token_ids)


def test_entry_points_that_cannot_be_used_are_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "broken-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[foredraft.drafters]\nmissing = nowhere_at_all:METHOD\nother = json:dumps\ntaken = json:METHOD\n"
    )
    code = "from foredraft.methods import methods; print(len(methods()))"
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(methods())
    for message in (
        "missing = nowhere_at_all:METHOD is skipped: ModuleNotFoundError",
        "other = json:dumps is skipped: ConfigError: the object is <function dumps",
        "taken = json:METHOD is skipped: AttributeError",
    ):
        assert message in done.stderr


@pytest.fixture
def _entry_in_a_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The method of the example, as if it were one of the lookups."""
    monkeypatch.syspath_prepend(FILE.parent)
    example = importlib.import_module(FILE.stem)
    monkeypatch.setattr(lookup, "METHODS", (example.METHOD, *lookup.METHODS))
    methods.cache_clear()
    yield
    methods.cache_clear()


@pytest.mark.usefixtures("_entry_in_a_family")
def test_an_entry_in_a_family_is_a_method() -> None:
    """Nothing else has to know of it: keys, ranges, errors and inference of the method follow."""
    assert list(methods()).index("echo") < list(methods()).index("ngram")
    config = SpeculativeConfig(echo_distance=3)
    assert (config.method, config.num_speculative_tokens, config.title) == ("echo", 4, "echo")
    assert SpeculativeConfig.parse("ngram>repeat_after").title == "ngram>echo"
    with pytest.raises(ValueError, match=r"echo_distance is 0; it must be 1 or more"):
        SpeculativeConfig(method="echo", echo_distance=0)
    with pytest.raises(ValueError, match="'echo_distance' has no meaning for method 'ngram', only for echo"):
        SpeculativeConfig(method="ngram", echo_distance=2)
    params, prompt = SamplingParams(temperature=1, seed=5, max_tokens=12), {"prompt_token_ids": [3, 4, 3, 4, 3]}
    model = toy_model(64)
    plain, echoed = (LLM(model, name).generate(prompt, params)[0].outputs[0].token_ids for name in (None, "echo"))
    assert echoed == plain


def test_the_example_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    example = importlib.import_module(FILE.stem)
    check_drafter(lambda depth: example.EchoDrafter(2, depth), CausalLM(toy_model()), depths=(1, 3))
