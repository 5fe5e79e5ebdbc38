"""The governor on texts and costs that are made up, and in engines, where no token changes. No test reads a clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_engine import Repeater

from foredraft import SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.cost_model import CostCurve, CostModel
from foredraft.engine.drafter import Drafter, DrafterFacts, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.governor import BEARABLE, TO_LOSE, Governor
from foredraft.engine.row import Row
from foredraft.engine.stats import StepClock, StepSeconds
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Wanted
from foredraft.testing import GREEDY, SAMPLED, toy_model
from foredraft.tree import DraftSize, DraftTree
from made_up_texts import FLAT, STEEP, Draft, World, chains, new_text, sure
from toys import small, target


def governor(curve: Mapping[int, float], facts: DrafterFacts | None = None) -> Governor:
    return Governor(CostModel({nodes: ms / 1e3 for nodes, ms in curve.items()}), facts)


def best_fixed(draft: Draft, curve: Mapping[int, float], level: float, num_rows: int) -> float:
    return max(World(draft, curve, level, num_rows).run(None, length=length) for length in (0, 1, 2, 3, 4, 6, 8))


# -- one way of drafting -----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rate", "curve", "level", "num_rows"),
    [
        (0.8, FLAT, 2.2, 1),
        (0.8, STEEP, 2.2, 8),
        (0.5, FLAT, 6.6, 1),
        (0.2, FLAT, 2.2, 8),
        (0.0, FLAT, 2.2, 1),
        (0.0, STEEP, 26.0, 8),
        (0.8, FLAT, 26.0, 1),
    ],
)
def test_no_fixed_length_is_much_better_in_hindsight(
    rate: float, curve: dict[int, float], level: float, num_rows: int
) -> None:
    draft = chains(rate)
    speed = World(draft, curve, level, num_rows).run(governor(curve))
    assert speed > 1.0 - BEARABLE
    assert speed > 0.93 * best_fixed(draft, curve, level, num_rows)  # learning from nothing included


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_a_busy_machine_does_not_drive_a_good_drafter_away(num_rows: int) -> None:
    """Times that vary by a third, and a pause in every twentieth step."""
    draft, one = chains(0.8), governor(FLAT)
    speed = World(draft, FLAT, 2.2, num_rows, noise=0.3, pauses=0.05).run(one, num_texts=24)
    assert speed > 0.9 * best_fixed(draft, FLAT, 2.2, num_rows)
    assert one.attends(num_rows)


def test_a_drafter_that_turns_good_is_found_again() -> None:
    one = governor(FLAT)
    World(chains(0.0), FLAT, 4.4).run(one, num_texts=6)
    speed = World(chains(0.9), FLAT, 4.4).run(one, num_texts=10)
    assert speed > 0.8 * World(chains(0.9), FLAT, 4.4).run(None, length=4)  # what it takes to notice included


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("level", [0.01, 2.2])
def test_a_curve_that_makes_drafts_too_dear_is_not_believed_for_long(is_whole: bool, level: float) -> None:
    """By it no draft would ever pay, so that none would be verified and nothing show that it is wrong."""
    one, draft = governor({1: 20.0, 2: 80.0, 64: 2000.0}), chains(0.9, is_whole=is_whole)
    World(draft, FLAT, level).run(one, num_texts=16)
    assert World(draft, FLAT, level).run(one) > 0.85 * World(draft, FLAT, level).run(governor(FLAT))
    assert one.costs.verify(1, 8) / one.costs.verify(1, 1) < 1.6


def test_drafts_that_mostly_bring_nothing_are_made_for_those_that_are_sure() -> None:
    """One in five is, and says so: by the mean of all, none was worth the time of making it."""
    world = World(sure({0.95: 0.95, 0.05: 0.02}, {0.95: 0.2, 0.05: 0.8}), STEEP, 0.5)
    assert world.run(governor(STEEP)) > 1.03
    assert world.share(0.95) > 0.9
    assert world.share(0.05) < 0.1
    never = World(sure({0.95: 0.3, 0.05: 0.02}, {0.95: 0.2, 0.05: 0.8}), STEEP, 0.5)
    assert never.run(governor(STEEP)) > 1.0 - BEARABLE


def taught(draft: Draft, curve: Mapping[int, float] = FLAT, level: float = 2.2, num_rows: int = 1) -> Governor:
    """A governor that has seen texts."""
    one = governor(curve)
    World(draft, curve, level, num_rows, noise=0.0, pauses=0.0).run(one)
    return one


# -- prices ------------------------------------------------------------------------------------------------------------


def test_what_is_kept_of_a_tree_is_what_a_brute_force_over_its_parts_keeps() -> None:
    """Every part that a tree can be cut to, at the price of a step of so many nodes."""
    curve = {1: 20.0, 2: 23.0, 3: 27.0, 4: 33.0, 5: 41.0, 6: 51.0, 64: 900.0}
    rng = random.Random(5)
    sizes = set()
    for _ in range(30):
        one, row = governor(curve), new_text(0)
        parents = (-1, *[rng.randrange(node) for node in range(1, 8)])
        scores = [1.0]
        for parent in parents[1:]:
            scores.append(scores[parent] * rng.uniform(0.05, 0.95))
        tree = DraftTree(tuple(range(8)), parents, scores=tuple(scores), source="drafter")
        one.plan([row], [DraftSize(8)])
        (kept,) = one.select([row], [tree])
        chances = one.acceptance.chances(tree)
        values = []
        for size in range(8):
            for nodes in itertools.combinations(range(1, 8), size):
                if all(parents[node] == 0 or parents[node] in nodes for node in nodes):
                    gained = sum(chances[node] for node in nodes)
                    cost = (CostCurve(curve).at(size + 1) - 20.0) / 20.0
                    values.append((gained - cost, size + 1, nodes))
        best, size, nodes = max(values)
        assert {tree.tokens[node] for node in (0, *nodes)} == set(kept.tokens) or best == pytest.approx(0.0, abs=0.03)
        sizes.add(len(kept))
    assert len(sizes) > 2


@pytest.mark.parametrize("is_closed", [False, True])
def test_in_a_closed_batch_the_row_that_ends_last_is_drafted_for(is_closed: bool) -> None:
    """Where others wait for the places of rows that end, all count alike."""
    curve = {1: 20.0, 2: 20.1, 3: 27.0, 4: 34.0, 64: 400.0}
    one = taught(chains(0.7, depth=1), curve, 0.2, num_rows=2)
    rows = [new_text(100, 30), new_text(101)]
    one.plan(rows, [DraftSize(1)] * 2, is_closed=is_closed)
    trees = one.select(rows, [chains(1.0, depth=1)(row, DraftSize(1)) for row in rows])
    assert [len(tree) for tree in trees] == ([1, 2] if is_closed else [2, 2])


# -- drafters that lose ------------------------------------------------------------------------------------------------


def lost(world: World) -> float:
    """Plain steps that drafting has lost."""
    return (world.spent - world.plain) / world.curve[1]


@pytest.mark.parametrize("observing", [2.2, 11.0, 40.0])
def test_what_a_drafter_may_lose_is_limited_however_often_it_is_tried_again(observing: float) -> None:
    """It costs something in every step that it is told of, drafts or not, and is never right."""
    one, world = governor(FLAT), World(chains(0.0), FLAT, 2.2, observing=observing)
    world.run(one, num_texts=8)
    assert not one.attends(1)
    world.run(one, num_texts=40)
    num_steps = len(world.sizes)
    assert lost(world) <= TO_LOSE + BEARABLE * num_steps
    assert lost(world) > TO_LOSE, "it was tried again"


# -- several ways of drafting ------------------------------------------------------------------------------------------

WAYS = DrafterFacts("several", arms=("bad", "good", "fair"))


def test_the_way_whose_tokens_take_the_least_time_runs_and_the_others_are_tried() -> None:
    """All are right about as often as they say; what tells them apart is what their drafts cost."""
    one = governor(FLAT, WAYS)
    world = World([chains(0.5), chains(0.8), chains(0.8)], FLAT, [4.4, 2.2, 8.8])
    world.run(one, num_texts=60)
    later = world.ways[200:]
    assert one.way == 1
    assert set(later) == {0, 1, 2}
    assert later.count(1) > 0.9 * len(later)
    alone = World(chains(0.8), FLAT, 2.2).run(governor(FLAT))
    start = len(world.ways)
    assert World([chains(0.5), chains(0.8), chains(0.8)], FLAT, [4.4, 2.2, 8.8]).run(one) > 0.96 * alone
    assert start > 200


def test_ways_are_chosen_by_the_number_of_rows() -> None:
    """With eight rows another one is the best: the first one's drafts take as long for every row."""

    def drafting(num_rows: int) -> list[float]:
        return [2.0 * num_rows, 6.0, 30.0]

    one = governor(FLAT, WAYS)
    for num_rows, best in ((1, 0), (8, 1), (1, 0)):
        World([chains(0.8)] * 3, FLAT, drafting(num_rows), num_rows).run(one, num_texts=24)
        one.plan([new_text(number) for number in range(num_rows)], [DraftSize(8)] * num_rows)
        assert one.way == best


def test_rows_rest_where_every_way_loses() -> None:
    one, world = governor(FLAT, WAYS), World([chains(0.0)] * 3, FLAT, [2.2] * 3, observing=8.0)
    world.run(one, num_texts=24)
    assert not one.attends(1)
    assert lost(world) <= TO_LOSE * 3 + BEARABLE * len(world.sizes)
    assert "not drafting: with the drafter, speed was" in str(one.describe())


# -- what it says ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_does_and_why() -> None:
    one = governor(STEEP)
    assert one.describe() is None
    World(chains(0.1), STEEP, 8.0).run(one)
    said = str(one.describe())
    assert said.startswith("not drafting: verify(5)/verify(1) = ")
    assert "acceptance 0." in said
    assert "at depth 1" in said
    assert one.totals.speedup == pytest.approx(1.0, abs=0.06)
    assert str(taught(chains(0.9)).describe()).startswith(("drafting in 9", "drafting in 100"))
    several = governor(FLAT, WAYS)
    World([chains(0.5), chains(0.8), chains(0.8)], FLAT, [4.4, 2.2, 8.8]).run(several)
    assert "; recent speed relative to plain decoding: bad " in str(several.describe())
    silent = governor(STEEP)
    World(lambda row, size: DraftTree.root(row.token_ids[-1]), STEEP, 8.0).run(silent, num_texts=2)
    assert str(silent.describe()).endswith("nothing was drafted so far")


# -- in engines --------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [9, 8, 7, 6, 5, 9, 8], [4, 4, 4, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
FREE = {1: 0.001, 512: 0.00101}
DEAR = {1: 0.001, 512: 0.512}
PARAMS = {"greedy": replace(GREEDY, max_tokens=24), "sampled": replace(SAMPLED, max_tokens=24)}


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a millisecond, and a tenth of that is the drafter's."""
    monkeypatch.setattr(StepClock, "enter", lambda *_: StepSeconds(0.0001, 0.0009))


def drafter_of(method: str) -> Drafter:
    keys: dict[str, Any] = {
        "auto": {"drafters": ["ngram", "suffix", "draft_model"]},
        "layer_skip": {"exit_layer": 1},
        "sparse_kv": {"kv_budget": 8, "kv_sinks": 1},
    }
    return make_drafter(SpeculativeConfig(method, **keys.get(method, {})), DrafterContext(target(), small()))


def governed(drafter: Drafter, curve: Mapping[int, float] = FREE, **options: Any) -> Engine:
    return Engine(target(), drafter, EngineConfig(**options), governor=Governor(CostModel(curve), drafter.facts))


def rows_of(one: Engine, params: SamplingParams) -> list[Row]:
    rows = [one.add_request(prompt, params)[0] for prompt in PROMPTS]
    list(one.run())
    return rows


def texts(one: Engine, kind: str) -> list[list[int]]:
    return [row.output_ids for row in rows_of(one, PARAMS[kind])]


@cache
def plain(kind: str) -> list[list[int]]:
    return texts(Engine(target(), EmptyDrafter(), EngineConfig(max_num_seqs=1)), kind)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize(
    ("method", "num_rows", "curve", "kind"),
    [
        ("ngram", 1, DEAR, "sampled"),
        ("draft_model", 5, FREE, "sampled"),
        ("layer_skip", 5, FREE, "sampled"),
        ("ngram+draft_model", 5, FREE, "greedy"),
        ("auto", 1, DEAR, "greedy"),
    ],
)
def test_no_token_changes(method: str, num_rows: int, curve: dict[int, float], kind: str) -> None:
    one = governed(drafter_of(method), curve, max_num_seqs=num_rows)
    for calls in (1, 2):  # with what the governor has learned
        assert texts(one, kind) == plain(kind)
        assert one.governor is not None
        assert one.governor.totals.num_tokens == calls * sum(map(len, plain(kind)))
    assert governed(drafter_of(method), acceptance="standard").governor is None


class Moody(Governor):
    """Lets every draft pass, and batches rest and come back at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(CostModel(FREE))
        self.rng = random.Random(seed)
        self.answers: Iterator[bool] = iter(())

    def attends(self, num_rows: int) -> bool:
        return next(self.answers, self.rng.random() < 0.9)

    def plan(self, rows: Any, limits: Any, *, is_closed: bool = False) -> Any:
        super().plan(rows, limits, is_closed=is_closed)
        return limits

    def select(self, rows: Any, drafts: Any) -> Any:
        return drafts


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "layer_skip"])
def test_resting_at_any_time_changes_no_token(method: str) -> None:
    rows: list[Row] = []
    for seed in range(2):
        one = Engine(
            target(), drafter_of(method), EngineConfig(max_num_seqs=3, prefill_chunk_size=4), governor=Moody(seed)
        )
        these = rows_of(one, PARAMS["sampled"])
        assert [row.output_ids for row in these] == plain("sampled")
        rows += these
    assert sum(row.stats.num_undrafted_steps["governor"] for row in rows) > 0
    assert sum(row.stats.num_accepted_draft_tokens for row in rows) > 0
    assert not any(row.stats.drafter_error for row in rows)


class Dawdling(Drafter):
    """Drafts nothing, wants features, and is told of every step."""

    facts = DrafterFacts("dawdling")

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.is_asked = False

    def needs(self, target: CausalLM, cache: Any) -> Needs:
        return Needs(last_hidden=True, choices=True)

    def start(self, rows: Any, chunks: Any) -> None:
        self.seen += [row.id for row in rows]

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        self.is_asked = True
        return [DraftTree.root(row.pending) for row in rows]

    def observe(self, rows: Any, results: Any) -> None:
        self.seen += [row.id for row in rows]

    def taken(self, *_: Any) -> StepSeconds:
        """Seconds of the step that has run."""
        was_asked, self.is_asked = self.is_asked, False
        return StepSeconds(0.005 * was_asked, 0.001)


def test_rows_go_on_without_a_drafter_that_takes_longer_than_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for it any more, and nothing shown to it; of later rows it is not even told."""
    wanted: list[Wanted] = []
    forward = CausalLM.forward_with
    monkeypatch.setattr(
        CausalLM, "forward_with", lambda *args, **keys: wanted.append(args[1]) or forward(*args, **keys)
    )
    drafter = Dawdling()
    monkeypatch.setattr(StepClock, "enter", drafter.taken)
    one = governed(drafter, max_num_seqs=2)
    rows = rows_of(one, replace(SAMPLED, max_tokens=60))
    assert all(row.is_plain for row in rows)
    assert not {*drafter.seen} & {row.id for row in rows[2:4]}
    assert [each.last_hidden for each in wanted].count(True) < 40
    assert rows[0].stats.num_undrafted_steps["governor"] >= 20
    assert one.governor is not None
    assert one.governor.totals.num_tokens == 60 * len(rows)
    empty = Engine(target(), EmptyDrafter())
    assert [row.output_ids for row in rows] == [row.output_ids for row in rows_of(empty, rows[0].params)]


@pytest.mark.parametrize("method", ["ngram", "dawdling"])
def test_a_running_row_comes_back_to_a_drafter_that_needs_its_text_alone(method: str) -> None:
    """Others cannot begin in the middle of a row: the next one has them again."""
    governor, drafter = Moody(0), Dawdling() if method == "dawdling" else drafter_of(method)
    governor.answers = itertools.chain([True] * 5, [False] * 6, itertools.repeat(True))
    one = Engine(target(), drafter, EngineConfig(), governor=governor)
    (row,) = one.add_request(PROMPTS[0], replace(GREEDY, max_tokens=40))
    found = [row.is_plain for _ in one.run()]
    assert found[2] is False
    assert True in found
    assert found[-1] is (method == "dawdling")
    (later,) = one.add_request(PROMPTS[1], PARAMS["greedy"])
    list(one.run())
    assert not later.is_plain


@pytest.mark.usefixtures("_clock")
def test_a_row_in_doubt_has_a_step_without_a_draft() -> None:
    """Token 63 is drafted, and makes everything behind it NaN, its siblings included."""
    model = toy_model(64, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = torch.nan
    spoiled = CausalLM(model, execution="eager", probe=False)
    params = replace(GREEDY, max_tokens=24, logit_bias={63: -1e9})
    plain_rows = rows_of(Engine(spoiled, EmptyDrafter()), params)
    drafter = Repeater([63])
    one = Engine(spoiled, drafter, EngineConfig(), governor=Governor(CostModel(FREE), drafter.facts))
    rows = rows_of(one, params)
    assert [row.output_ids for row in rows] == [row.output_ids for row in plain_rows]
    assert sum(row.stats.num_undrafted_steps["doubt"] for row in rows) > 0


# -- what it begins with -----------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_reading_prompts_counts_as_loss(seconds: float) -> None:
    """A head that reads long prompts for short answers loses more than its drafts bring."""
    one, attended = governor(STEEP), []
    for _ in range(40):
        World(chains(0.5), STEEP, 0.2).run(one, num_texts=1)
        one.read(seconds)
        attended.append(one.attends(1))
    assert all(attended) == (seconds == 0.0)
