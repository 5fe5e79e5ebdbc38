"""foredraft tune: walks along recorded texts, counts, prices, the choice, its sentence, and the profile."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import foredraft.tune.tuning as tuning_of
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.bench.candidates import read_candidates
from foredraft.bench.workload import BenchPrompt
from foredraft.cli import app
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine.cost_model import CostCurve
from foredraft.engine.costs import StepCosts
from foredraft.engine.engine import Engine
from foredraft.engine.profiles import Profile
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tune.choosing import choose
from foredraft.tune.counting import (
    LENGTHS,
    PLAIN,
    TIMED_TEXTS,
    Setting,
    SettingCounts,
    decoded,
    record,
    settings_of,
    spread,
    undisturbed,
    walked,
)
from foredraft.tune.tuning import Tuning
from foredraft.tune.walk import CountedStep, Counts, RecordedText, Walk

pytestmark = pytest.mark.usefixtures("_loaded_once")

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CHEAP, DEAR = {1: 0.020, 2: 0.021, 5: 0.024, 17: 0.036}, {1: 0.020, 2: 0.030, 5: 0.038, 17: 0.12}


def prices(*curves: dict[int, float]) -> StepCosts:
    return StepCosts(tuple(CostCurve(seconds, 256) for seconds in curves), is_steady=True)


def arm(title: str, *texts: tuple[int, int], length: int = 4, method: str = "ngram") -> SettingCounts:
    """Of every text so many steps with a draft of ``length``, of which so many tokens are right."""
    counts = tuple(
        Counts(Counter({CountedStep(length + 1, length, length, right): steps}), steps * (right + 1))
        for steps, right in texts
    )
    config = {"method": method, "num_speculative_tokens": length, "length_policy": "fixed"}
    return SettingCounts(Setting(title, config, length=length), counts, title)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(toy_model(64), execution="eager")


@pytest.fixture(scope="module")
def texts(target: CausalLM) -> list[RecordedText]:
    prompts = [(f"kind {i % 2}", tuple([1 + i, 2, 3] * 6)) for i in range(3)]
    return record(target, prompts, PARAMS, (), lambda _: None)


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: made("ngram", 6), SuffixDrafter])
def test_a_walk_takes_the_steps_of_the_engine(target: CausalLM, texts: list[RecordedText], make: Any) -> None:
    """Texts do not depend on drafts, so that what the engine accepts is what the walk does, step by step."""
    for text in texts:
        engine, walk = Engine(target, make()), Walk(target, make(), [text])
        (row,) = engine.add_request(text.prompt, text.params)
        decoded_steps = [
            (len(output.tree), output.num_accepted, output.token_ids)
            for outputs in engine.run()
            for output in outputs
            if output.tree is not None
        ]
        walked_steps = []
        while walk.enter(1):
            trees = walk.propose(walk.budgets())
            (output,) = walk.emit(trees)
            walked_steps.append((len(trees[0]), output.num_accepted, output.token_ids))
        assert walked_steps == decoded_steps
        assert tuple(row.output_ids) == text.output


def test_counts_along_texts_are_those_of_decoding(target: CausalLM, texts: list[RecordedText]) -> None:
    known = prices(CHEAP)
    settings = settings_of("ngram", {"method": "ngram", "num_speculative_tokens": 4}, is_walked=True)
    assert [one.name for one in settings] == ["ngram, governed", *(f"ngram, K = {k}" for k in (1, 2, 3, 4))]
    found = {one.setting.name: one for one in walked(target, lambda: made("ngram", 4), settings, texts, known)}
    again = decoded(target, lambda: made("ngram", 4), settings[-1], texts, known)
    for mine, its in zip(found["ngram, K = 4"].counts, again.counts, strict=True):
        assert mine.num_tokens == its.num_tokens == 24
        assert mine.num_steps == its.num_steps
        assert sum(step.accepted * count for step, count in mine.steps.items()) == 24 - mine.num_steps
    assert known.drafting["ngram"].keys() == {1, 2, 3, 4}
    assert known.drafting["ngram, K = 4"].keys() == {1}


def test_settings_of_trees_are_sizes_and_of_dear_drafters_few() -> None:
    trees = settings_of("suffix", {"method": "suffix"}, is_walked=True)
    assert {one.nodes for one in trees} >= {2, 8, 24}
    dear = settings_of("eagle3", {"method": "eagle3"}, is_walked=False)
    assert [one.nodes for one in dear] == [4, 8, 12]
    assert all(one.config["length_policy"] == "fixed" for one in dear)


# -- what drafting costs, of steps that were timed ------------------------------------------------------------------


def test_both_kinds_of_steps_of_a_union_count() -> None:
    """Its head was asked in every second step: half of the time went by in steps that the median passes over."""
    mostly = [0.3, 2.4] * 11 + [0.3] * 2
    assert undisturbed(mostly) == pytest.approx((13 * 0.3 + 8 * 2.4) / 21)
    assert undisturbed([2.4] * 10 + [0.3] * 14) > 0.9


def test_pauses_of_the_machine_do_not_count() -> None:
    assert undisturbed([1.0] * 21 + [900.0] * 3) == 1.0
    assert undisturbed([1.0]) == 1.0


@pytest.mark.parametrize(("number", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (12, [0, 4, 8])])
def test_texts_are_taken_evenly(number: int, places: list[int]) -> None:
    texts = [RecordedText("", (place,), (), PARAMS) for place in range(number)]
    assert [text.prompt[0] for text in spread(texts, TIMED_TEXTS)] == places


# -- the choice --------------------------------------------------------------------------------------------------------


def test_a_clear_gain_is_chosen_and_explained_by_numbers() -> None:
    found = choose([arm("ngram", *[(10, 2)] * 8), arm("other", *[(25, 0)] * 4, *[(30, 0)] * 4)], prices(CHEAP))
    assert found.chosen.setting.name == "ngram, K = 4"
    assert found.chosen.speed == pytest.approx(3 * 0.020 / 0.024)
    assert found.ties == ()
    assert found.sentence() == (
        "ngram, K = 4 gains 150 % (150 to 150): 3.00 tokens per step at 1.20 times the cost of a plain step "
        "(verify(5) / verify(1) = 1.20)."
    )


def test_nothing_pays_where_verifying_is_dear() -> None:
    found = choose([arm("ngram", *[(20, 0), (12, 1)] * 4)], prices(DEAR))
    assert found.plain_is_best
    assert found.chosen.speed == 1.0
    # 40 drafted steps of 32 bring (20 + 24) tokens; a step costs 38 ms, a plain one 20
    assert found.sentence().startswith("plain decoding is best: ngram, K = 4 would lose 28 % (47 to 5)"[:47])
    assert "verify(5) / verify(1) = 1.90" in found.sentence()


def test_a_longer_draft_that_loses_is_named() -> None:
    short = arm("ngram", *[(10, 1)] * 8, length=1)
    long = arm("ngram", *[(10, 1)] * 8, length=16)
    found = choose([short, long], prices(DEAR))
    assert found.chosen.setting.length == 1
    assert "; ngram, K = 16 would lose 67 %, since verify(17) / verify(1) = 6.00" in found.sentence()


def test_a_tie_is_named_and_the_simpler_is_taken() -> None:
    """On half of the texts one is better, on half the other."""
    one = arm("ngram", *[(10, 2), (20, 1)] * 6)
    other = arm("suffix", *[(20, 1), (10, 2)] * 6, method="suffix")
    better = replace(other, counts=(*other.counts[:-1], Counts(Counter({CountedStep(5, 4, 4, 3): 7}), 28)))
    found = choose([one, better], prices(CHEAP))
    assert found.best.setting.title == "suffix"
    assert found.chosen.setting.title == "ngram"
    assert "A tie: the measurements do not separate it from 'suffix, K = 4'; the simplest of them was chosen." in (
        found.sentence()
    )


@pytest.mark.parametrize(
    ("num_others", "said"),
    [
        (2, "from 'ngram, K = 5' or 'ngram, K = 6'; it"),
        (4, "from 'ngram, K = 5', 'ngram, K = 6', 'ngram, K = 7' or 1 more; it"),
    ],
)
def test_names_of_a_tie_can_be_told_apart(num_others: int, said: str) -> None:
    """They hold commas themselves: "from ngram, governed and ngram, K = 1 and ngram, K = 2 and 23 more"."""
    arms = [arm("ngram", *[(10, 2), (20, 1)] * 6, length=4 + place) for place in range(1 + num_others)]
    found = choose(arms, prices(CHEAP))
    assert said in replace(found, ties=found.ranked[: 1 + num_others]).sentence()


def test_what_is_not_known_of_the_curve_widens_the_interval() -> None:
    arms = [arm("ngram", *[(10, 1)] * 8)]
    sure = choose(arms, prices(CHEAP)).ranked
    unsure = choose(arms, prices(CHEAP, {**CHEAP, 5: 0.035})).ranked
    assert sure[0].low == sure[0].high
    ngram = next(one for one in unsure if one.setting is not PLAIN)
    assert ngram.low == pytest.approx(2 * 0.020 / 0.035)
    assert ngram.high == pytest.approx(2 * 0.020 / 0.024)


def test_few_prompts_prove_nothing() -> None:
    assert (
        "2 prompts are too few for a reliable result"
        in choose([arm("ngram", (10, 2), (10, 2))], prices(CHEAP)).sentence()
    )


def test_batches_are_dearer_to_verify() -> None:
    found = choose([arm("ngram", *[(10, 1)] * 8)], prices({**CHEAP, 8: 0.02, 40: 0.2}), num_rows=8)
    assert found.plain_is_best
    assert found.speed_at(found.ranked[1], 1) > 1.0 > found.speed_at(found.ranked[1], 8)


def test_the_same_counts_and_prices_have_the_same_choice() -> None:
    arms = [arm("ngram", (10, 1), (12, 0), (9, 3), (7, 2), (10, 1), (11, 0)), arm("x", *[(9, 1), (8, 2)] * 3)]
    once, again = (choose(arms, prices(CHEAP, DEAR), seed=3) for _ in range(2))
    assert once.as_dict() == again.as_dict()


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _given_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve that nobody measures, and no time beside it."""

    def given(*_: Any, **__: Any) -> StepCosts:
        known = prices({**CHEAP, 64: 0.05}, {**CHEAP, 64: 0.06})
        known.host_seconds, known.drafting = 1e-4, {name: dict.fromkeys(LENGTHS, 1e-5) for name in ("ngram", "suffix")}
        known.drafting |= {f"token_recycling, {nodes} nodes": {1: 1e-4} for nodes in (4, 8, 16)}
        return known

    monkeypatch.setattr(tuning_of, "prices_of", given)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", "--model", "zoo:tiny", "--num-prompts", "6", *arguments])


SHORT = ["--max-new-tokens", "12", "--dtype", "float32"]


@pytest.mark.full
@pytest.mark.usefixtures("_given_prices")
def test_two_runs_choose_alike_and_the_profile_is_taken(tmp_path: Path) -> None:
    """The choice rests on counts and prices, and what is written says how to draft."""
    found = []
    for name in ("a.json", "b.json"):
        out = str(tmp_path / name)
        result = run(*SHORT, "--methods", "ngram,suffix,token_recycling", "--out", out, "--json")
        assert result.exit_code == 0, result.output
        found.append(
            {key: value for key, value in json.loads(result.stdout).items() if key not in ("out", "conditions")}
        )
    assert found[0] == found[1]
    assert found[0]["num_prompts"] == 6
    assert {one["name"] for one in found[0]["compared"]} >= {
        "plain decoding", "ngram, governed", "suffix, 8 nodes", "token_recycling, 4 nodes",
    }  # fmt: skip
    profile = Profile.load(tmp_path / "a.json")
    config = found[0]["speculative_config"]
    assert profile.method == config["method"]
    llm = LLM("zoo:tiny", f"@{tmp_path / 'a.json'}", dtype="float32", profile_file=tmp_path / "a.json")
    assert llm.speculative_config.method == config["method"]
    line = ["generate", "Hello", "--model", "zoo:tiny", "--max-new-tokens", "4", "--profile-file", out, "--json"]
    assert CliRunner().invoke(app, [*line, "--dtype", "float32"]).exit_code == 0
    other = CliRunner().invoke(app, [*line, "--dtype", "bfloat16"])
    assert (other.exit_code, "dtype torch.float32; here" in other.stderr) == (2, True), other.stderr


@pytest.mark.usefixtures("_given_prices")
def test_the_budget_is_planned_by_prices() -> None:
    llm = LLM("zoo:tiny", dtype="float32")
    tuning = Tuning(llm, {"ngram": {"method": "ngram"}}, budget_seconds=10.0)
    tuning.measure()
    # 8 rows of 1 node take 27 ms together: 64 tokens of a prompt 0.216 s, and a quarter of the budget holds 11
    assert tuning.num_prompts(27, 64) == 11
    with pytest.raises(ConfigError, match=r"--budget is 10 seconds, but decoding 6 prompts with 640 .* needs about 52"):
        tuning.num_prompts(27, 640)


@pytest.mark.usefixtures("_given_prices")
def test_a_budget_without_end_has_room_for_all() -> None:
    """`--budget inf` was a traceback."""
    tuning = Tuning(LLM(toy_model(64)), {}, budget_seconds=float("inf"))
    tuning.measure()
    assert tuning.num_prompts(9, 64) == 9


@pytest.mark.usefixtures("_given_prices")
def test_what_the_budget_has_no_room_for_is_named(tmp_path: Path) -> None:
    result = run(*SHORT, "--methods", "ngram,token_recycling", "--budget", "1.2", "--out", str(tmp_path / "a.json"))
    assert result.exit_code == 0, result.output
    assert "not tried for lack of time: token_recycling" in result.output


def test_prices_are_kept_with_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    facts = {"model": "x"}
    assert StepCosts.kept(facts) is None
    known = StepCosts((CostCurve(CHEAP, 256, 1e-7),), 1e-4, {"ngram": {4: 1e-5}}, "today", is_steady=False)
    known.keep(facts)
    assert StepCosts.kept(facts) == known
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(file.read_text().replace("0.02", "0.01"))
    assert StepCosts.kept(facts) is None


@pytest.mark.usefixtures("_given_prices")
def test_no_method_applies() -> None:
    tuning = Tuning(LLM(toy_model(64)), {"draft_model": {"method": "draft_model"}}, budget_seconds=60.0)
    tuning.measure()
    with pytest.raises(ConfigError, match=r"none of the methods can be tried: draft_model: .* needs a draft model"):
        tuning.run([BenchPrompt(str(i), "x", (1, 2, 3 + i)) for i in range(6)], PARAMS)


@pytest.mark.usefixtures("_given_prices")
def test_the_picture_has_three_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    result = run(*SHORT, "--methods", "ngram", "--out", str(tmp_path / "a.json"), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_takes_the_file_of_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"facts": {}, "speculative_config": {"method": "ngram"}}))
    (found,) = read_candidates(f"@{tmp_path / 'a.json'}", None, 3).values()
    assert found == {"method": "ngram", "num_speculative_tokens": 3}


def test_bench_leaves_out_a_choice_of_plain_decoding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the page shows was refused where tune had found nothing faster."""
    (tmp_path / "a.json").write_text(json.dumps({"facts": {}, "speculative_config": {"method": "none"}}))
    with caplog.at_level("WARNING", "foredraft"):
        assert [*read_candidates(f"@{tmp_path / 'a.json'},ngram", None, None)] == ["ngram"]
    assert "a.json contains plain decoding" in caplog.text
    with pytest.raises(ConfigError, match="names of methods"):
        read_candidates(f"@{tmp_path / 'a.json'}", None, None)
    with pytest.raises(ConfigError, match="contains plain decoding"):
        read_candidates("none,ngram", None, None)


@pytest.mark.usefixtures("_given_prices")
def test_the_command_that_is_told_names_the_model(tmp_path: Path) -> None:
    """It drafted for the default model, by what was measured of another one."""
    result = run(*SHORT, "--methods", "ngram", "--out", str(tmp_path / "my choice.json"))
    told = f"foredraft generate --model zoo:tiny --profile-file '{tmp_path / 'my choice.json'}'"
    assert told in result.stdout.replace("\n", ""), result.output
