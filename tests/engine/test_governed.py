"""Governed engines: no token changes, whatever is decided; LLMs are governed by default; curves are measured once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams, speculate
from foredraft.cli.writers import summary
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine import costs, governing
from foredraft.engine.cost_model import FEW, CostCurve, CostModel
from foredraft.engine.costs import Forward, StepCosts
from foredraft.engine.engine import Engine
from foredraft.engine.governing import new_governor
from foredraft.engine.governor import Governor
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.method_bandit import MethodBandit
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, SAMPLED, perturbed, toy_model
from foredraft.tree import DraftTree

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [9, 8, 7, 6, 5, 9, 8], [4, 4, 4, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
FREE = {1: 0.001, 512: 0.00101}
DEAR = {1: 0.001, 512: 0.512}


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(64), execution="eager")


@cache
def draft_model() -> CausalLM:
    return CausalLM(perturbed(toy_model(64), 0.1, seed=2), execution="eager")


def engine(method: str, curve: Mapping[int, float], num_rows: int) -> Engine:
    keys: dict[str, dict[str, Any]] = {
        "auto": {"drafters": ["ngram", "suffix", "draft_model"]},
        "layer_skip": {"exit_layer": 1},
    }
    config = SpeculativeConfig(method, **keys.get(method, {}))
    drafter = make_drafter(config, DrafterContext(target(), draft_model()))
    costs = CostModel(curve)
    decides = MethodBandit(drafter.facts, costs) if drafter.facts.arms else Governor(costs)
    return Engine(target(), drafter, EngineConfig(max_num_seqs=num_rows), governor=decides)


def texts(one: Engine, params: SamplingParams) -> list[list[int]]:
    rows = [one.add_request(prompt, params)[0] for prompt in PROMPTS]
    list(one.run())
    return [row.output_ids for row in rows]


@cache
def plain(params: str) -> list[list[int]]:
    return texts(Engine(target(), EmptyDrafter(), EngineConfig(max_num_seqs=1)), PARAMS[params])


PARAMS = {
    "greedy": SamplingParams(**{**vars(GREEDY), "max_tokens": 24}),
    "sampled": SamplingParams(**{**vars(SAMPLED), "max_tokens": 24}),
}


@pytest.mark.parametrize(
    ("method", "num_rows", "curve", "params"),
    [
        ("ngram", 5, FREE, "greedy"),
        ("ngram", 1, DEAR, "sampled"),
        ("suffix", 3, FREE, "sampled"),
        ("draft_model", 5, FREE, "sampled"),
        ("draft_model", 1, DEAR, "greedy"),
        ("token_recycling", 5, FREE, "greedy"),
        ("token_recycling", 2, DEAR, "sampled"),
        ("lookahead", 3, FREE, "greedy"),
        ("jacobi", 5, FREE, "sampled"),
        ("layer_skip", 5, FREE, "sampled"),
        ("ngram+draft_model", 5, FREE, "greedy"),
        ("ngram>draft_model", 2, FREE, "sampled"),
        ("auto", 5, FREE, "sampled"),
        ("auto", 1, DEAR, "greedy"),
    ],
)
def test_no_token_changes(method: str, num_rows: int, curve: dict[int, float], params: str) -> None:
    one = engine(method, curve, num_rows)
    assert texts(one, PARAMS[params]) == plain(params)
    assert texts(one, PARAMS[params]) == plain(params)  # with what the governor has learned
    assert one.governor.totals.num_tokens > 0


def test_other_rules_are_not_governed() -> None:
    drafter = make_drafter(SpeculativeConfig("ngram"), DrafterContext(target()))
    one = Engine(target(), drafter, EngineConfig(acceptance="standard"), governor=Governor(CostModel(FREE)))
    assert one.governor is None


@pytest.mark.usefixtures("_governed")
def test_where_nothing_was_drafted_no_speed_is_claimed() -> None:
    """generate ended with "about 0.69 times the speed of plain decoding, not drafting" over two undrafted steps."""
    llm = LLM(toy_model(64), "ngram")
    (output,) = llm.generate([list(range(5, 60))], SamplingParams(temperature=0, max_tokens=2, logit_bias={3: 99.0}))
    assert output.metrics.speculative_decoding["num_spec_steps"] == 0
    assert output.metrics.governor["estimated_speedup"] is None
    said = summary([output])
    assert "nothing was drafted" in said
    assert "times the speed" not in said
    assert "tokens accepted" not in said
    (output,) = llm.generate([[1, 2, 3] * 6], SamplingParams(temperature=0, max_tokens=40, logit_bias={3: 99.0}))
    assert output.metrics.speculative_decoding["num_spec_steps"] > 0
    said = summary([output])
    assert "times the speed of plain decoding" in said
    assert "verified draft tokens accepted" in said


# -- doors ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_governed")
def test_an_llm_is_governed_unless_it_is_told_a_length() -> None:
    base = LLM(toy_model(64))
    prompt = {"prompt_token_ids": [1, 2, 3] * 6}
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs: dict[str, Any] = {
        str(config): base.with_speculative_config(config).generate(prompt, params)[0]
        for config in (
            "ngram",
            {"method": "ngram", "length_policy": "fixed"},
            {"method": "ngram", "rejection_sample_method": "standard"},
            "none",
        )
    }
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    governed, *others = outputs.values()
    assert governed.metrics.governor["decision"].startswith(("drafting", "not drafting"))
    assert governed.metrics.governor["estimated_speedup"] > 0
    assert [other.metrics.governor for other in others] == [None] * 3


@pytest.mark.usefixtures("_governed")
def test_what_an_llm_has_learned_is_there_in_its_next_call() -> None:
    llm = LLM(toy_model(64), "ngram")
    params = SamplingParams(temperature=0, max_tokens=16)
    for calls in (1, 2):
        llm.generate({"prompt_token_ids": [1, 2, 3] * 6}, params)
        governor = llm.drafting.governor(llm.target, make_drafter(llm.speculative_config, DrafterContext(llm.target)))
        assert governor.totals.num_tokens == 16 * calls


@pytest.mark.usefixtures("_governed")
def test_the_hook_keeps_its_governor_between_calls() -> None:
    import torch

    model = toy_model(64)
    hook = speculate("ngram")
    ids = torch.tensor([[1, 2, 3] * 6])
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, custom_generate=hook), want)
    adapter, drafting = hook._prepared(model)
    governor = drafting.governor(adapter.target, drafting.new_drafter())
    assert governor.totals.num_tokens == 32


# -- curves --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.fixture
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs the tests."""
    monkeypatch.setattr(costs, "BUSY", float("inf"))


@pytest.mark.usefixtures("_steady")
def test_a_curve_is_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = costs.cost_curve(CausalLM(toy_model(64), execution="eager"))
    assert {1, 4, 16} <= first.seconds.keys()
    assert all(seconds > 0 for seconds in first.seconds.values())
    assert first.per_token >= 0
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    assert kept["facts"]["dtype"] == "torch.float64"
    monkeypatch.setattr(costs, "measure_curve", lambda target: pytest.fail("measured again"))
    assert costs.cost_curve(CausalLM(toy_model(64, seed=1), execution="eager")) == first  # of the same shapes


def test_on_a_busy_machine_some_processes_measure_and_the_next_takes_what_they_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUSY", -1.0)
    measure, found = costs.measure_curve, []

    def measured(target: CausalLM) -> tuple[CostCurve, bool]:
        found.append(measure(target))
        return found[-1]

    monkeypatch.setattr(costs, "measure_curve", measured)
    for number in range(FEW + 2):
        one = CausalLM(toy_model(64), execution="eager")  # as another process would
        curve = costs.cost_curve(one)
        assert costs.cost_curve(one) == curve
        assert len(found) == min(number + 1, FEW)
    for count in curve.seconds:
        assert curve.seconds[count] == pytest.approx(sum(one.seconds[count] for one, _ in found) / len(found))


@pytest.mark.usefixtures("folder")
def test_what_a_quiet_machine_shows_replaces_what_a_busy_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = [(CostCurve({1: 1.0, 4: 3.0}), False), (CostCurve({1: 1.0, 4: 2.0}), True)]
    monkeypatch.setattr(costs, "measure_curve", lambda target: curves.pop(0))
    for wanted in (3.0, 2.0, 2.0):
        curve = costs.cost_curve(CausalLM(toy_model(64), execution="eager"))
        assert curve.seconds == {1: 1.0, 4: wanted}


def test_pairs_are_compared_at_one_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By made-up times: a machine that gets slower all the time, and steps of n nodes that take 1 + n / 4."""
    now = [0.0]

    def times(forwards: Sequence[Forward], repeats: int, *, warm_ups: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in forwards]
        for _ in range(repeats):
            for place, forward in enumerate(forwards):
                now[0] += 0.01
                found[place].append((1.0 + forward.width / 4) * (1.0 + now[0]))
        return found

    monkeypatch.setattr(costs, "forward_times", times)
    curve, _ = costs.measure_curve(target())
    assert curve.seconds[16] / curve.seconds[1] == pytest.approx(4.0, rel=0.02)
    assert curve.seconds[4] / curve.seconds[1] == pytest.approx(1.6, rel=0.02)


@pytest.mark.usefixtures("_steady")
def test_a_curve_that_steps_disprove_is_dropped_from_the_disk(folder: Path) -> None:
    """By made-up times: eight nodes take ten times what one does, or what the file says."""
    one = CausalLM(toy_model(64), execution="eager")
    curve = costs.cost_curve(one)
    (file,) = folder.iterdir()
    governor = new_governor(one, make_drafter(SpeculativeConfig("ngram"), DrafterContext(one)))
    assert isinstance(governor, Governor)
    for _ in range(8):
        governor.costs.verified(1, 1, curve.seconds[1])
        governor.costs.verified(1, 8, curve.seconds[8])
    assert file.exists()
    for _ in range(8):
        governor.costs.verified(1, 12, 100 * curve.seconds[12])
    assert not file.exists()
    assert governor.costs.verify(1, 16) / governor.costs.verify(1, 1) > 10
    costs.cost_curve(one)
    assert file.exists()


@pytest.mark.usefixtures("_steady")
def test_a_digit_that_was_damaged_is_measured_again(folder: Path) -> None:
    """A time that is a thousand times too long is as likely as any: only the digest tells."""
    one = CausalLM(toy_model(64), execution="eager")
    curve = costs.cost_curve(one)
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    facts = costs.facts_of(one)
    known = StepCosts.kept(facts)
    assert known.curves == (curve,)
    kept["curves"][0]["seconds"]["4"] *= 1000
    file.write_text(json.dumps(kept))
    assert StepCosts.kept(facts) is None
    again = costs.cost_curve(CausalLM(toy_model(64), execution="eager"))
    assert again.seconds[4] < 100 * curve.seconds[4]
    known = StepCosts.kept(facts)
    assert known.curves == (again,)


@pytest.mark.usefixtures("_steady")
def test_another_dtype_is_another_curve(folder: Path) -> None:
    import torch

    for dtype in (torch.float64, torch.float32):
        costs.cost_curve(CausalLM(toy_model(64, dtype=dtype), execution="eager"))
    assert len(list(folder.iterdir())) == 2


def kept(curve: str) -> str:
    """A file with this curve alone, as costs are kept."""
    return f'{{"curves": [{curve}], "host_seconds": 0.0, "drafting": {{}}, "measured": "", "is_steady": true}}'


def signed(text: str) -> str:
    """A file with this content and the digest that belongs to it."""
    content = json.loads(text)
    return json.dumps({**content, "digest": costs._digest(content)})


@pytest.mark.usefixtures("_steady")
def test_a_file_that_says_nothing_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[CausalLM] = []

    def measure(target: CausalLM) -> tuple[CostCurve, bool]:
        measured.append(target)
        return CostCurve({1: 1.0, 4: 2.0}), True

    monkeypatch.setattr(costs, "measure_curve", measure)
    costs.cost_curve(CausalLM(toy_model(64), execution="eager"))
    (file,) = folder.iterdir()
    for number, content in enumerate(
        [
            "",
            "{",
            "[]",
            signed(kept('{"seconds": [1], "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {}, "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": -1}, "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": 1}, "context": 256, "per_token": -1}')),
            signed(kept('{"seconds": {"1": 1}}')),
            kept('{"seconds": {"1": 1}, "context": 256, "per_token": 0.0}'),
            signed(kept('{"seconds": {"1": Infinity}, "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": NaN}, "context": 256, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": 1}, "context": 256, "per_token": Infinity}')),
            signed(kept('{"seconds": {"1": 1}, "context": Infinity, "per_token": 0.0}')),
            signed(kept('{"seconds": {"1": 1%s}, "context": 256, "per_token": 0.0}' % ("0" * 400))),
            "[" * 100_000,
        ],
        2,
    ):
        file.write_text(content)
        assert costs.cost_curve(CausalLM(toy_model(64), execution="eager")).seconds == {1: 1.0, 4: 2.0}
        assert len(measured) == number, content[:80]
        assert "facts" in json.loads(file.read_text())


@pytest.mark.usefixtures("_steady")
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "costs").write_text("in the way")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    assert 1 in costs.cost_curve(CausalLM(toy_model(64), execution="eager")).seconds


def test_a_short_context_and_no_time_are_enough(folder: Path) -> None:
    short = CausalLM(toy_model(64, max_position_embeddings=12), execution="eager")
    found, _ = costs.measure_curve(short)
    assert max(found.seconds) < 12
    assert found.context + max(found.seconds) <= 12
    assert set(costs.measure_curve(target(), seconds=0.0)[0].seconds) <= {1, 4, 16, 64}


@pytest.mark.usefixtures("_steady")
def test_a_longer_context_is_measured_to_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By made-up times: what a forward takes is what its cache holds."""

    def times(forwards: Sequence[Forward], repeats: int, *, warm_ups: int) -> list[list[float]]:
        return [[1.0 + forward.width + forward.cache.lengths[0] / 1000] * repeats for forward in forwards]

    monkeypatch.setattr(costs, "forward_times", times)
    long = CausalLM(toy_model(64, max_position_embeddings=4096), execution="eager")
    found, is_steady = costs.measure_curve(long)
    assert is_steady
    assert found.context == costs.CONTEXT
    assert found.seconds[4] == pytest.approx(5.256)
    assert found.per_token == pytest.approx(0.001)
    monkeypatch.setattr(costs, "MOST_BYTES", 1000 * bytes_per_token(long))
    lengths = []
    monkeypatch.setattr(
        costs,
        "forward_times",
        lambda forwards, repeats, warm_ups: (
            lengths.append(forwards[-1].cache.lengths[0]) or times(forwards, repeats, warm_ups=warm_ups)
        ),
    )
    assert costs.measure_curve(long)[0].per_token == pytest.approx(0.001)
    assert set(lengths) == {1000}


def test_a_governor_begins_with_what_is_usual_for_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight outcomes are what that is worth: it takes more than a few misses to doubt it, and not many."""
    monkeypatch.setattr(governing, "cost_curve", lambda target: CostCurve({1: 0.02, 16: 0.03}))
    drafter = make_drafter(SpeculativeConfig("sparse_kv", kv_budget=8, kv_sinks=1), DrafterContext(target()))
    governor = new_governor(target(), drafter)
    assert isinstance(governor, Governor)
    survival, usual = governor.acceptance, drafter.facts.usual_acceptance
    rows: Any = [SimpleNamespace(state={}) for _ in range(13)]
    assert survival.by_depth(rows[12], 3) == pytest.approx([usual, usual**2, usual**3])
    drafts = [DraftTree.chain(1, [2, 3, 4], source=drafter.name) for _ in range(12)]
    for row, draft in zip(rows[:2], drafts[:2], strict=True):
        survival.proposed(row, draft)
        survival.came(row, [9])
    assert survival.by_depth(rows[12], 1)[0] > 0.65
    for row, draft in zip(rows[2:12], drafts[2:], strict=True):
        survival.proposed(row, draft)
        survival.came(row, [9])
    assert survival.by_depth(rows[12], 1)[0] < 0.4
