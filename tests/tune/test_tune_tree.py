"""The search for trees of heads: what is counted, what is grown of it, what it costs, and the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.engine.cost_model import CostCurve
from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.medusa_hydra import HeadsShape, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_medusa
from foredraft.llm import LLM
from foredraft.methods.rank_tree import RankTree
from foredraft.testing import PROMPTS, decode
from foredraft.tune.trees import MISS, Hits, measured_costs, measured_hits, search, sizes_to_measure, watched_hits
from toy_heads import VOCAB_SIZE, hydra_heads, medusa_heads, target

pytestmark = pytest.mark.usefixtures("_loaded_once")

HITS = Hits(((0, 0), (0, 1), (1, 0), (0, MISS), (MISS, 0), (0,)), 2)


def drafter(kind: str, tree: RankTree | None = None) -> Any:
    growth: dict[str, Any] = {"target_vocab_size": VOCAB_SIZE, "max_depth": 4}
    growth["tree"] = tree or RankTree.cartesian((1,))
    if kind == "medusa":
        return MultiHeadDrafter(medusa_heads(), 2, **growth)
    return MultiHeadDrafter(hydra_heads(True), 2, **growth)


def test_accuracies_are_means_over_the_places_that_have_a_token() -> None:
    assert HITS.accuracies[0][:3] == [4 / 6, 1 / 6, 0]
    assert HITS.accuracies[1][:3] == [3 / 5, 1 / 5, 0]


def test_tokens_per_step_are_counted_path_by_path() -> None:
    """Of the five places with both tokens: (0, 0) is right to its end, (0, 1) and (0, MISS) for one token."""
    tree = RankTree.of([[0], [0, 0]])
    assert HITS.tokens_per_step(tree) == 1 + (2 + 1 + 0 + 1 + 0) / 5
    assert HITS.tokens_per_step(RankTree.of([[0], [1], [0, 0], [1, 0]])) == 1 + (2 + 1 + 2 + 1 + 0) / 5


def test_costs_between_measured_sizes_are_in_proportion() -> None:
    costs = CostCurve({1: 2.0, 4: 2.6, 8: 4.0}), CostCurve({1: 0.2, 8: 0.9})
    _, sizes = search(HITS, 8, lambda tree: costs, 8)
    cost_of = {one.num_nodes: one.cost for one in sizes}
    assert cost_of[4] == pytest.approx((2.6 + 0.5) / 2)
    assert cost_of[6] == pytest.approx((3.3 + 0.7) / 2)
    assert cost_of[8] == pytest.approx(4.9 / 2)
    assert sizes_to_measure(14) == [1, 2, 3, 4, 6, 8, 10, 12, 14]


def test_the_size_is_that_with_the_most_tokens_per_second() -> None:
    """Ten nodes are nearly free, the eleventh costs as much as a plain step."""
    hits = Hits(tuple((rank % 5, rank % 3) for rank in range(60)), 2)

    def costs(tree: RankTree) -> tuple[CostCurve, CostCurve]:
        return CostCurve({1: 1.0, 10: 1.001, 11: 2.0, 64: 3.0}), CostCurve({1: 0.0})

    best, sizes = search(hits, 64, costs, None)
    assert best.num_nodes == len(best.tree) == 10
    assert best.speedup == max(one.speedup for one in sizes)
    assert len(search(hits, 64, costs, 7)[0].tree) == 7
    free, sizes = search(hits, 64, lambda tree: (CostCurve({1: 1.0}), CostCurve({1: 0.0})), None)
    assert free.tokens_per_step == max(one.tokens_per_step for one in sizes)
    dear, _ = search(hits, 64, lambda tree: (CostCurve({1: 1.0, 64: 64.0}), CostCurve({1: 0.0})), None)
    assert dear.num_nodes == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "temperature"), [("medusa", 0.9), ("hydra", 0.0)])
def test_what_is_counted_is_what_steps_accept(kind: str, temperature: float) -> None:
    """A run of the engine accepts at every place it comes to as far as the ranks of that place lie in the tree."""
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=11)
    hits = measured_hits(target(), drafter(kind), [PROMPTS[0]], params)
    tree = RankTree.cartesian((3, 2, 2, 1))
    place_of = dict(enumerate(hits.ranks))
    seen = []

    class Watched(type(drafter(kind))):
        def observe(self, rows: Any, results: Any) -> None:
            for row, result in zip(rows, results, strict=True):
                start = len(row.token_ids) - len(result.emitted) - row.num_prompt_tokens
                seen.append((start, result.num_accepted))
            super().observe(rows, results)

    watched = drafter(kind, tree)
    watched.__class__ = Watched
    decode(target(), watched, [(PROMPTS[0], params)])
    assert len(seen) > 3
    paths = set(tree.paths)
    for start, accepted in seen:
        ranks = place_of[start]
        assert ranks[:accepted] in paths | {()}
        assert accepted == len(ranks) or accepted == 4 or ranks[: accepted + 1] not in paths


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_that_are_watched_tell_what_asking_the_heads_tells(temperature: float) -> None:
    """Of the first head all places that steps come to; of later ones those at which the best ones before were right."""
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=4)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    asked = set(measured_hits(target(), drafter("hydra"), prompts, params).ranks)
    watched = watched_hits(target(), drafter("hydra"), prompts, params, 4)
    assert not watched.are_whole
    assert {len(ranks) for ranks in watched.ranks} >= ({1, 4} if temperature == 0 else {1, 2})
    for ranks in watched.ranks:
        assert set(ranks[:-1]) <= {0}
        assert any(known[: len(ranks)] == ranks for known in asked)
    tree = RankTree.grown(watched.accuracies, 12)
    assert watched.tokens_per_step(tree) == tree.value(watched.accuracies) > 1
    with pytest.raises(ConfigError, match="nothing was drafted"):
        watched_hits(target(), drafter("hydra"), [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=1), 4)


def test_costs_rise_with_the_size() -> None:
    costs = measured_costs(target(), drafter("hydra"), RankTree.grown([[0.5, 0.1]] * 4, 12), PROMPTS[0], repeats=2)
    assert list(costs[0].seconds) == [1, 2, 3, 4, 6, 8, 10, 12]
    for seconds in (curve.seconds for curve in costs):
        assert min(seconds.values()) > 0
        assert list(seconds.values()) == sorted(seconds.values())


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="too short for 4 heads"):
        measured_hits(target(), drafter("medusa"), [PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=2))


def test_the_verb_writes_a_tree_that_generate_takes(tmp_path: Path) -> None:
    llm = LLM("zoo:tiny")
    write_checkpoint(
        tmp_path / "heads", *write_medusa(MedusaHeads(HeadsShape(int(llm.target.config.hidden_size), 0, 3)))
    )
    out = tmp_path / "tree.json"
    given = ["tune", "tree", "zoo:tiny", "--out", str(out), "--num-prompts", "2", "--max-new-tokens", "8"]
    given += ["--max-nodes", "6", "--repeats", "1"]
    found = CliRunner().invoke(app, [*given, "--heads", str(tmp_path / "heads"), "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["method"] == "medusa"
    assert len(report["accuracies"]) == 3
    assert [size for size, _, _ in report["sizes"]] == [2, 3, 4, 5, 6]
    assert json.loads(out.read_text())["paths"] == report["paths"]
    config = {"model": str(tmp_path / "heads"), "speculative_token_tree": str(out)}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (sample,) = llm.with_speculative_config(config).generate("One", greedy)[0].outputs
    assert len(sample.token_ids) == 4
    shown = CliRunner().invoke(app, [*given, "--speculative-config", json.dumps(config), "--nodes", "3"])
    assert shown.exit_code == 0, shown.output
    assert "tokens per step" in shown.output
    assert len(json.loads(out.read_text())["paths"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the heads"),
        (["--speculative-config", '{"method": "ngram"}'], "not 'ngram'"),
        (["--heads", "./nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["tune", "tree", "zoo:tiny", "--out", str(tmp_path / "tree.json"), *arguments])
    assert found.exit_code != 0
    assert message in found.output + found.stderr
    nowhere = CliRunner().invoke(app, ["tune", "tree", "zoo:tiny", "--out", str(tmp_path / "a" / "b.json"), *arguments])
    assert "folder that exists" in nowhere.output + nowhere.stderr
