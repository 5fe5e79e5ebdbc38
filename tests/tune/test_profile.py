"""foredraft tune profile: what it measures, what follows from it, what a governor takes from it, and bad files."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.bench.workload import BenchPrompt
from foredraft.cli import app
from foredraft.drafters.compose import UnionDrafter
from foredraft.engine.cost_model import CostCurve
from foredraft.engine.costs import StepCosts
from foredraft.engine.governor import Governor, new_governor
from foredraft.engine.profiles import Profile
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tune.profile import best_length, expected_speed, measure
from foredraft.tune.walk import CountedStep, Counts, rates

pytestmark = pytest.mark.usefixtures("_loaded_once")

CURVE = CostCurve({1: 0.020, 2: 0.021, 5: 0.024, 9: 0.030}, 256)
PROMPTS = [BenchPrompt(str(i), "x", tuple([1 + i, 2, 3] * 6)) for i in range(3)]


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(toy_model(64), execution="eager")


@pytest.fixture(scope="module")
def found(target: CausalLM) -> Profile:
    profile, _ = measure(
        target,
        "ngram",
        partial(made, "ngram"),
        6,
        PROMPTS,
        max_new_tokens=24,
        batch_sizes=[1, 2],
        contexts=[32],
        repeats=1,
    )
    return profile


def text(*steps: tuple[int, int]) -> Counts:
    """One whose steps have drafted and kept so many tokens."""
    found = Counter(CountedStep(drafted + 1, drafted, drafted, kept) for drafted, kept in steps)
    return Counts(found, sum(kept + 1 for _, kept in steps))


def prices(drafting: dict[int, float]) -> StepCosts:
    return StepCosts((CURVE,), drafting={"ngram": drafting})


def test_rates_are_those_of_what_was_tried() -> None:
    assert rates([text((3, 3), (3, 1)), text((2, 0), (1, 1))]) == (3 / 4, 1 / 2, 1.0)
    known = prices({1: 0.001, 3: 0.003})
    assert known.draft_seconds("ngram", 2) == pytest.approx(0.002)
    assert known.draft_seconds("ngram", 5) == pytest.approx(0.005)


def test_expected_speed_is_tokens_by_time() -> None:
    drafted = [(2, 2), (2, 2), (2, 1), (2, 1), (2, 0)]
    texts = [text(*drafted, *[(0, 0)] * 5)]
    assert rates(texts) == (0.8, 0.5)
    # half of the steps draft two tokens: 1 + 0.5 (0.8 + 0.4) tokens in half 20 and half 22 ms
    assert CURVE.at(3) == pytest.approx(0.022)
    assert expected_speed(texts, prices({1: 0.0, 2: 0.0}), "ngram", CURVE, 2) == pytest.approx(1.6 * 20 / 21)


def test_the_best_length_follows_from_costs() -> None:
    texts = [text((4, 4), (4, 2), (4, 4)), text((4, 0), (4, 4))]
    dear = CostCurve({1: 0.02, 5: 0.2}, 256, num_rows=8)
    cheap, none = (best_length(texts, prices({1: 1e-6}), "ngram", curve) for curve in (CURVE, dear))
    assert cheap.num_speculative_tokens == 4
    assert cheap.low <= cheap.speedup <= cheap.high
    assert (none.num_speculative_tokens, none.speedup) == (0, 1.0)


def test_a_profile_holds_what_was_measured_and_survives_its_file(found: Profile, tmp_path: Path) -> None:
    assert [curve.num_rows for curve in found.curves] == [1, 2]
    assert set(found.drafting) == {1, 6}
    assert 0 < len(found.acceptance) <= 6
    file = tmp_path / "p.json"
    file.write_text(json.dumps(found.as_dict()))
    assert Profile.load(file).as_dict() == found.as_dict()


def test_a_governor_begins_with_it(found: Profile, target: CausalLM) -> None:
    governor = new_governor(target, made("ngram", 6), found)
    assert isinstance(governor, Governor)
    assert governor.acceptance.at_depth(1, "ngram") == pytest.approx(found.acceptance[0])
    assert governor.costs.draft(1, 6) == pytest.approx(found.drafting[6], rel=0.5)
    assert governor.costs.times_seen(2, 2) > 0


def test_a_governor_of_several_ways_begins_with_it_in_the_way_that_was_measured(
    found: Profile, target: CausalLM
) -> None:
    drafter = UnionDrafter([made("ngram", 6), made("jacobi", 6)])
    assert drafter.facts.arms == ("ngram", "ngram+jacobi")
    governor = new_governor(target, drafter, replace(found, method="union"))
    assert isinstance(governor, Governor)
    assert governor.acceptance.at_depth(1, "ngram+jacobi") == pytest.approx(found.acceptance[0])
    assert governor.costs.draft(1, 6) == pytest.approx(found.drafting[6], rel=0.5)


def test_costs_of_another_machine_are_left_out(
    found: Profile, target: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = Profile(
        "ngram", {**found.facts, "device": "abacus"}, found.curves, found.drafting, found.acceptance, found.settings
    )
    with caplog.at_level(logging.WARNING, "foredraft"):
        governor = new_governor(target, made("ngram", 6), elsewhere)
    assert "device abacus, now" in caplog.text
    assert isinstance(governor, Governor)
    assert governor.costs.draft(1, 6) is None
    assert governor.acceptance.at_depth(1, "ngram") == pytest.approx(found.acceptance[0])


def test_another_model_is_refused(found: Profile) -> None:
    with pytest.raises(ConfigError, match=r"another model \(layers 2; this model has layers 3\); make one with"):
        found.difference({**found.facts, "layers": 3})


@pytest.mark.parametrize("config", [None, "ngram", {"method": "ngram", "length_policy": "fixed"}])
def test_another_model_is_refused_however_it_drafts(found: Profile, tmp_path: Path, config: Any) -> None:
    """Where plain decoding had been chosen for another model, this one was decoded plainly without a word."""
    file = tmp_path / "profile.json"
    file.write_text(
        json.dumps(Profile(found.method, {**found.facts, "layers": 99}, *list(vars(found).values())[2:]).as_dict())
    )
    with pytest.raises(ConfigError, match="another model"):
        LLM("zoo:tiny", config, profile_file=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not valid JSON"),
        ("{}", "not a foredraft profile file"),
        (
            '{"format": "foredraft-profile", "method": "ngram", "facts": {}, "costs": [{"num_rows": 1}]}',
            "is incomplete or invalid",
        ),
        ("[]", "not a foredraft profile file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "p.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        LLM(toy_model(64), "ngram", profile_file=file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drafting_seconds", {"1": float("inf")}),
        ("drafting_seconds", {"-1": 0.1}),
        ("acceptance", [float("nan")]),
        ("acceptance", [1.5]),
        ("acceptance", [True]),
        ("acceptance", [10**400]),
        ("costs", [{"num_rows": 0, "context": 256, "seconds": {"1": 0.1}}]),
        ("costs", [{"num_rows": 1.5, "context": 256, "seconds": {"1": 0.1}}]),
        ("drafting_seconds", {"1": 0.0}),
        ("settings", [{"num_rows": 1}]),
        ("settings", [dict.fromkeys(("num_rows", "context", "num_speculative_tokens", "speedup", "low", "high"), "1")]),
    ],
    ids=repr,
)
def test_values_that_nobody_measured_are_refused(found: Profile, key: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**found.as_dict(), key: value}))
    with pytest.raises(ConfigError, match=r"is incomplete or invalid .*; make one with foredraft tune"):
        Profile.load(file)


def test_the_verb_measures_checks_and_is_taken_by_an_llm(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    arguments = ["tune", "profile", "zoo:tiny", "--dtype", "float32", "--num-prompts", "3", "--max-new-tokens", "24"]
    arguments += ["--batch-sizes", "1", "--contexts", "64", "--repeats", "1", "--json", "-o", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["settings"][0]["num_rows"] == 1
    llm = LLM("zoo:tiny", "ngram", dtype="float32", profile_file=file)
    assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "ngram+suffix"], "has no draft length"),
        (["--batch-sizes", "0"], "batch-sizes is '0'"),
        (["--contexts", "x"], "contexts is 'x'"),
        (["--method", "nonsense"], "is not known"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "profile", "zoo:tiny", *arguments, "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 2
    assert message in result.output
