"""The governor: drafts sized by what they cost and bring, on texts and costs that are made up; no clock is read."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.engine.budget import DraftSize, Habit, _standings, best_counts, weights_of
from foredraft.engine.cost_model import CostCurve, CostModel
from foredraft.engine.governor import Governor
from foredraft.engine.stats import RowStats, Steps
from foredraft.tree import DraftTree

FLAT = {1: 22.2, 5: 24.2, 16: 27.8, 32: 32.5, 64: 45.0}
STEEP = {1: 20.0, 2: 28.0, 4: 38.0, 8: 60.0, 16: 110.0, 32: 210.0, 64: 400.0}
"""Milliseconds by nodes: a model that reads more than it computes, and one that does not."""

LENGTH = 220


@dataclass
class Guesser:
    """Drafts that are right with a chance that depends on the place in the text."""

    rate: Callable[[int], float]
    depth: int = 8
    is_whole: bool = False

    def draft(self, text: list[int], place: int, row: int, length: int) -> DraftTree:
        tokens = []
        is_right = True
        for position in range(place, place + min(length, self.depth)):
            is_right = is_right and random.Random(f"{row}/{place}/{position}").random() < self.rate(position)
            tokens.append(text[position] if is_right and position < len(text) else 10_000 + position)
        return replace(DraftTree.chain(text[place - 1], tokens, source="guesser"), is_whole=self.is_whole)


@dataclass
class World:
    """Decodes made-up texts under made-up costs.

    Args:
      level_cost: milliseconds that a drafted level takes.
    """

    guesser: Guesser
    curve: dict[int, float]
    level_cost: float
    num_rows: int = 1
    num_texts: int = 8
    noise: float = 0.05
    plain: float = 0.0
    spent: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def run(self, governor: Governor | None, length: int = 0) -> float:
        """Speed by that of plain decoding; without a governor with drafts of this length."""
        costs = CostModel(self.curve)
        noise = random.Random(0)
        waiting = [[random.Random(row).randrange(1000) for _ in range(LENGTH)] for row in range(self.num_texts)]
        rows: list[Any] = []
        number = 0
        while waiting or rows:
            while waiting and len(rows) < self.num_rows:
                rows.append(SimpleNamespace(id=number, state={}, text=waiting.pop(0), place=20, is_finished=False))
                number += 1
            budgets = [DraftSize(LENGTH - row.place - 1) for row in rows]
            if governor is None:
                budgets = [DraftSize(min(budget, length)) for budget in budgets]
            else:
                budgets = governor.budgets(rows, budgets)
            asked = max(budgets)
            trees = [
                self.guesser.draft(row.text, row.place, row.id, budget)
                for row, budget in zip(rows, budgets, strict=True)
            ]
            if governor is not None:
                trees = governor.trimmed(rows, trees)
            outputs = [self._accept(row, tree) for row, tree in zip(rows, trees, strict=True)]
            size = sum(map(len, trees))
            self.sizes.append(size)
            drafting, verifying = self.level_cost * asked, costs.curve(size)
            self.spent += drafting + verifying
            self.plain += costs.curve(len(rows)) / len(rows) * sum(len(output.token_ids) for output in outputs)
            factor = math.exp(noise.gauss(0.0, self.noise)) * (3.0 if noise.random() < 0.01 else 1.0)
            if governor is not None:
                seconds = {"drafting_seconds": drafting * factor / 1e3, "other_seconds": verifying * factor / 1e3}
                governor.learn(trees, outputs, **seconds)
            rows = [row for row in rows if not row.is_finished]
        return self.plain / self.spent

    def _accept(self, row: Any, tree: DraftTree) -> Any:
        node: int | None = 0
        emitted = []
        while node is not None and row.place < LENGTH:
            emitted.append(row.text[row.place])
            row.place += 1
            node = tree.child(node, emitted[-1])
        row.is_finished = row.place >= LENGTH
        return SimpleNamespace(row=row, token_ids=tuple(emitted), num_accepted=len(emitted) - 1)


def governor(curve: dict[int, float], **options: Any) -> Governor:
    return Governor(CostModel({nodes: ms / 1e3 for nodes, ms in curve.items()}), **options)


def best_fixed(guesser: Guesser, curve: dict[int, float], level_cost: float, num_rows: int) -> float:
    return max(World(guesser, curve, level_cost, num_rows).run(None, length) for length in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize(
    ("rate", "curve", "level_cost"),
    [
        (0.8, FLAT, 2.2),
        (0.8, STEEP, 2.2),
        (0.5, FLAT, 6.6),
        (0.2, FLAT, 2.2),
        (0.0, FLAT, 2.2),
        (0.0, STEEP, 26.0),
        (0.8, FLAT, 26.0),
    ],
)
def test_no_fixed_length_is_much_better_in_hindsight(
    rate: float, curve: dict[int, float], level_cost: float, num_rows: int
) -> None:
    guesser = Guesser(lambda place: rate)
    speed = World(guesser, curve, level_cost, num_rows).run(governor(curve))
    assert speed > 0.97
    assert speed > 0.93 * best_fixed(guesser, curve, level_cost, num_rows)  # learning from nothing included


def test_a_text_that_changes_its_nature_is_followed() -> None:
    guesser = Guesser(lambda place: 0.9 if place < LENGTH // 2 else 0.1)
    speed = World(guesser, FLAT, 2.2).run(governor(FLAT))
    assert speed > 1.05 * best_fixed(guesser, FLAT, 2.2, 1)


def test_a_drafter_that_turns_good_is_found_again() -> None:
    one = governor(FLAT)
    World(Guesser(lambda place: 0.0), FLAT, 4.4, num_texts=6).run(one)
    world = World(Guesser(lambda place: 0.9), FLAT, 4.4, num_texts=10)
    speed = world.run(one)
    assert speed > 0.8 * World(Guesser(lambda place: 0.9), FLAT, 4.4).run(None, 4)  # what it takes to notice included


@pytest.mark.parametrize(("num_rows", "num_plain"), [(1, 1), (8, 3)])
def test_what_a_plain_step_of_several_rows_takes_is_seen_soon(num_rows: int, num_plain: int) -> None:
    """The curve was measured with one row; where 8 nodes fill a tile, 9 of 8 rows take far more than it says."""
    world = World(Guesser(lambda place: 0.9), FLAT, 2.2, num_rows)
    world.run(governor(FLAT))
    assert world.sizes[:24].count(num_rows) == num_plain


def test_a_plain_step_that_is_due_decides_what_follows_it_too() -> None:
    """Where steps are short, the next decision comes only steps later; until then an older one was followed."""
    one, text = governor(FLAT), list(range(LENGTH))
    row: Any = SimpleNamespace(id=0, state={}, text=text, place=20, is_finished=False)
    due = []
    for _ in range(40):
        place, one.habit.depth = row.place, 0
        (budget,) = one.budgets([row], [DraftSize(8)])
        trees = one.trimmed([row], [Guesser(lambda place: 1.0).draft(text, place, 0, budget)])
        row.place += len(trees[0])
        output: Any = SimpleNamespace(row=row, token_ids=tuple(text[place : row.place]), num_accepted=len(trees[0]) - 1)
        one.learn(trees, [output], drafting_seconds=0.002 * bool(budget), other_seconds=0.026)
        row.place = 20
        due += [one.habit.depth] * (budget == 0)
    assert due
    assert all(due)


def test_decisions_repeat_where_the_clock_does() -> None:
    sizes = []
    for _ in range(2):
        world = World(Guesser(lambda place: 0.6), FLAT, 4.4, num_rows=3)
        world.run(governor(FLAT))
        sizes.append(world.sizes)
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 2


def test_costs_that_differ_from_the_curve_are_learned() -> None:
    """The curve says that nodes are free, and they are not."""
    one = governor({1: 20.0, 64: 20.5})
    guesser = Guesser(lambda place: 0.3)
    assert World(guesser, STEEP, 0.2, num_texts=10).run(one) > 0.95
    verify = one.costs.verify(1, 8) / one.costs.verify(1, 1)
    assert verify == pytest.approx(3.0, rel=0.35)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("level_cost", [0.0, 2.2])
def test_a_curve_that_makes_drafts_too_dear_is_not_believed_for_long(is_whole: bool, level_cost: float) -> None:
    """By it no draft would ever pay, so that none would be verified and nothing show that it is wrong."""
    one = governor({1: 20.0, 2: 80.0, 64: 2000.0})
    guesser = Guesser(lambda place: 0.9, is_whole=is_whole)
    World(guesser, FLAT, level_cost, num_texts=16).run(one)
    later = World(guesser, FLAT, level_cost, num_texts=8).run(one)
    assert later > 0.85 * World(guesser, FLAT, level_cost, num_texts=8).run(governor(FLAT))
    assert one.costs.verify(1, 8) / one.costs.verify(1, 1) < 1.6


def test_drafts_that_cannot_be_cut_stay_whole_or_go() -> None:
    world = World(Guesser(lambda place: 0.95, is_whole=True), FLAT, 0.5)
    world.run(governor(FLAT))
    later = world.sizes[30:]
    assert set(later) <= {1, 3, *range(1, 10)}
    assert sum(size >= 8 for size in later) > 0.7 * len(later)


def test_it_says_what_it_does_and_why() -> None:
    one = governor(STEEP)
    assert one.describe() is None
    World(Guesser(lambda place: 0.1), STEEP, 8.0).run(one)
    said = one.describe()
    assert said.startswith("not drafting: verify(5)/verify(1) = ")
    assert "at depth 1" in said
    assert one.totals.speedup == pytest.approx(1.0, abs=0.06)


def test_it_speaks_of_no_acceptance_where_nothing_was_drafted() -> None:
    """It once said "acceptance 0.60 at depth 1", which is what it expects of a drafter that it does not know."""
    one = governor(STEEP)
    silent: Any = SimpleNamespace(draft=lambda text, place, row_id, budget: DraftTree.root(text[place]))
    World(silent, STEEP, 8.0, num_texts=2).run(one)
    said = one.describe()
    assert said is not None
    assert "acceptance" not in said
    assert "nothing was drafted so far" in said


def test_where_nothing_was_drafted_the_speed_is_that_of_plain_decoding() -> None:
    """Steps that took longer than was expected, as the first ones do: that says nothing of drafts."""
    one = governor(FLAT)
    rows: list[Any] = [SimpleNamespace(id=0, state={}, is_finished=False)]
    output: Any = SimpleNamespace(row=rows[0], token_ids=(5,))
    for seconds in (0.09, 0.05, 0.03, 0.0222, 0.0222):
        one.budgets(rows, [DraftSize(8)])
        tree = DraftTree.root(1)
        one.learn([tree], [output], drafting_seconds=0.0, other_seconds=seconds)
    steps = Steps()
    steps.add(1, 0, 1, 0.0, 0.06)
    one.follow_steps(steps)
    assert one.totals.speedup == pytest.approx(1.0)


# -- parts ----------------------------------------------------------------------------------------------------------


def test_levels_that_a_drafter_never_makes_are_neither_hoped_for_nor_paid_for() -> None:
    """It makes three levels however many it may; one more is asked for, to notice where it goes deeper."""
    curve = {1: 20.0, 64: 21.0}
    one = governor(curve)
    guesser = Guesser(lambda place: 0.9, depth=3)
    rows: list[Any] = [SimpleNamespace(id=0, state={}, is_finished=False)]
    text = list(range(5000))
    place, asked = 20, []
    for _ in range(120):
        (budget,) = one.budgets(rows, [DraftSize(64)])
        asked.append(int(budget))
        tree = guesser.draft(text, place, 0, budget)
        levels = tree.depth
        (tree,) = one.trimmed(rows, [tree])
        emitted, node = [], tree.child(0, text[place])
        while node is not None:
            emitted.append(text[place + len(emitted)])
            node = tree.child(node, text[place + len(emitted)])
        emitted.append(text[place + len(emitted)])
        place += len(emitted)
        output: Any = SimpleNamespace(row=rows[0], token_ids=tuple(emitted))
        one.learn([tree], [output], drafting_seconds=0.004 * levels, other_seconds=0.02)
    assert sum(depth == 4 for depth in asked[20:]) > 0
    assert max(asked[20:]) == 4
    assert one.costs.draft(1, 3) == pytest.approx(0.012, rel=0.1)


def test_a_first_draft_that_is_slow_does_not_keep_a_batch_from_drafting() -> None:
    """Four rows after long texts: most of a step is what rows cost, so it pays to let any of them end early."""
    curve = CostCurve({1: 0.010, 64: 0.020}, context=256, per_token=2e-6)
    one, tokens = Governor(CostModel(curve)), iter(range(1_000_000))
    world = CostModel(curve)
    world.after(7000)
    rows: list[Any] = [
        SimpleNamespace(id=i, state={}, is_finished=False, num_remaining_tokens=200, stats=RowStats()) for i in range(4)
    ]
    drafted = []
    for number in range(60):
        budgets = one.budgets(rows, [DraftSize(3)] * 4, is_closed=True, context=7000)
        asked = max(budgets)
        drafted.append(int(asked))
        drafts = [[next(tokens) for _ in range(asked)] for _ in rows]
        trees = [DraftTree.chain(0, draft, source="sparse") for draft in drafts]
        trees = one.trimmed(rows, trees)
        outputs: list[Any] = [
            SimpleNamespace(row=row, token_ids=(*tree.tokens[1:], next(tokens)))
            for row, tree in zip(rows, trees, strict=True)
        ]
        for row, output in zip(rows, outputs, strict=True):
            row.stats.record(len(output.token_ids) - 1, len(output.token_ids) - 1, len(output.token_ids))
        seconds = world.verify(4, sum(map(len, trees)))
        drafting = 0.007 * asked + (0.2 if number == 0 else 0.0)
        one.learn(trees, outputs, drafting_seconds=drafting, other_seconds=seconds)
    assert sum(depth == 3 for depth in drafted[6:]) > 45


def test_a_row_that_gains_more_than_others_counts_less_at_the_end_of_a_batch() -> None:
    """Both have as many tokens to come, and one makes two in a step: what it gains does not make the batch shorter."""
    one = Governor(CostModel(FLAT))
    fast, slow = (
        SimpleNamespace(id=i, state={}, is_finished=False, num_remaining_tokens=100, stats=RowStats()) for i in range(2)
    )
    for _ in range(50):
        fast.stats.record(1, 1, 2)
        slow.stats.record(1, 0, 1)

    def value(gains: Sequence[int], *, is_closed: bool) -> float:
        rows: list[Any] = [fast, slow]
        one.budgets(rows, [DraftSize(3)] * 2, is_closed=is_closed)
        outputs = [SimpleNamespace(row=row, token_ids=(5,) * (1 + gain)) for row, gain in zip(rows, gains, strict=True)]
        return one.value_of(outputs)  # type: ignore[arg-type]

    assert value([1, 0], is_closed=False) == value([0, 1], is_closed=False) == 3.0
    assert value([0, 0], is_closed=True) == 2.0
    assert value([1, 0], is_closed=True) < 2.3
    assert value([0, 1], is_closed=True) > 3.0


def test_the_best_nodes_are_those_of_exhaustive_search() -> None:
    rng = random.Random(3)
    for _ in range(50):
        found = [
            sorted(((rng.random(), node) for node in range(1, 1 + rng.randrange(5))), reverse=True) for _ in range(3)
        ]
        price = rng.random() * 0.5

        def worth(size: int, are_chains: bool, price: float = price) -> float:
            return price * (size - 3) ** 0.8

        counts, stated = best_counts(found, worth)
        value = sum(chance for nodes, n in zip(found, counts, strict=True) for chance, _ in nodes[:n])
        value -= worth(3 + sum(counts), False)
        assert stated == pytest.approx(value)
        for first in range(len(found[0]) + 1):
            for second in range(len(found[1]) + 1):
                for third in range(len(found[2]) + 1):
                    some = (first, second, third)
                    other = sum(chance for nodes, n in zip(found, some, strict=True) for chance, _ in nodes[:n])
                    assert value >= other - worth(3 + sum(some), False) - 1e-9


def test_a_batch_ends_with_its_last_row() -> None:
    """Rows that are ahead count by what they cost beside others: here a tenth of a step that four rows take.

    The rest goes to rows by their chance to be the last one, and of k that may be it counts by a kth.
    """
    ahead = weights_of([40, 30, 20, 4], 0.9)
    assert ahead == sorted(ahead, reverse=True)
    assert ahead[3] == pytest.approx(0.4, abs=0.001)
    chances = [math.exp(-late) / sum(math.exp(-late) for late in (0, 2.5, 5, 9)) for late in (0, 2.5, 5, 9)]
    assert sum(ahead) == pytest.approx(4 * (0.4 + 0.6 * sum(chance**2 for chance in chances)))
    last, first = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    alike = last**2 + first**2
    assert weights_of([40, 32], 1.1) == pytest.approx([2 * alike * last, 2 * alike * first])
    assert weights_of([5, 5, 5], 1.0) == pytest.approx([1 / 3] * 3)
    assert weights_of([5, 5], 0.0) == [1.0, 1.0]


# -- steps between two decisions ------------------------------------------------------------------------------------

WIDE = DraftTree.from_paths(1, [[2, 3, 4], [2, 5], [6, 7], [8]])


def kept(habit: Habit, tree: DraftTree) -> DraftTree:
    """What is left of one draft."""
    (found,) = habit.cut([tree])
    return found


def adopt(
    habit: Habit, trees: list[DraftTree], kept: list[DraftTree], worth: Any = lambda size, are_chains: 0.0
) -> None:
    habit.adopt(trees, kept, worth)


def scored(*scores: float) -> DraftTree:
    """Siblings with these scores."""
    tokens = (1, *range(2, 2 + len(scores)))
    return DraftTree(tokens, (-1, *[0] * len(scores)), scores=(1.0, *scores))


def test_standings_are_ranks_along_the_path() -> None:
    assert _standings(DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 1))) == [0, 1, 2, 257, 258]


def test_drafts_without_scores_are_cut_where_one_like_them_was() -> None:
    habit = Habit()
    adopt(habit, [WIDE], [DraftTree.from_paths(1, [[2, 5], [6]])])
    other = DraftTree.from_paths(9, [[12, 13, 14], [12, 15], [16, 17], [18]])
    assert {kept(habit, other).path_tokens(node) for node in range(4)} == {(), (12,), (12, 15), (16,)}
    adopt(habit, [WIDE], [WIDE])
    assert kept(habit, other) is other


def test_chains_are_cut_to_the_length_of_the_last() -> None:
    habit = Habit()
    adopt(habit, [DraftTree.chain(1, [2, 3, 4, 5])], [DraftTree.chain(1, [2, 3])])
    assert kept(habit, DraftTree.chain(7, [8, 9, 10])).tokens == (7, 8, 9)
    assert kept(habit, DraftTree.root(7)).tokens == (7,)
    adopt(habit, [DraftTree.chain(1, [2, 3])], [DraftTree.root(1)])
    assert kept(habit, DraftTree.chain(7, [8, 9, 10])).tokens == (7,)


def test_chains_of_several_rows_are_cut_to_their_mean() -> None:
    """What the last row kept was once the length of all: any one, by chance."""
    habit = Habit()
    chain = DraftTree.chain(1, [2, 3, 4, 5, 6, 7])
    adopt(habit, [chain] * 3, [chain, chain.cut(5), chain.cut(1)])
    assert len(kept(habit, chain)) == 1 + 4
    adopt(habit, [chain, chain.cut(2)], [chain, chain.cut(2)])
    assert kept(habit, chain) is chain


def test_what_is_worth_drafting_is_half_of_what_one_more_node_costs() -> None:
    """Of the nodes that were kept last; drafts without scores say nothing of that."""

    def worth(size: int, are_chains: bool) -> float:
        return 0.04 * size**2

    habit = Habit()
    adopt(habit, [WIDE], [WIDE], worth)
    assert habit.least == 0.0
    adopt(habit, [scored(0.9, 0.5, 0.1)], [scored(0.9, 0.5)], worth)
    assert habit.least == pytest.approx(0.04 * (4**2 - 3**2) / 2)
    assert habit.budgets([DraftSize(8)])[0].least == habit.least
    adopt(habit, [scored(0.4)], [DraftTree.root(1)], worth)
    assert habit.least == pytest.approx(0.04 * (2**2 - 1**2) / 2)


def test_what_cannot_be_cut_is_kept_whole_or_dropped() -> None:
    habit = Habit()
    whole = replace(DraftTree.chain(1, [2]), is_whole=True)
    adopt(habit, [replace(WIDE, is_whole=True)], [WIDE])
    assert kept(habit, whole).tokens == (1, 2)
    adopt(habit, [replace(WIDE, is_whole=True)], [DraftTree.root(1)])
    assert kept(habit, whole).tokens == (1,)


def test_budgets_are_those_of_the_decision_and_keep_their_other_limits() -> None:
    habit = Habit()
    habit.depth = 3
    cut, short = habit.budgets([DraftSize(8, 16, True), DraftSize(2)])
    assert (cut.depth, cut.nodes, cut.chains_only, short.depth) == (3, 16, True, 2)
    habit.depth = sys.maxsize
    assert habit.budgets([DraftSize(8)]) == [8]


# -- drafts with scores, between decisions ---------------------------------------------------------------------------


@dataclass
class Sure:
    """Decodes one row with drafts of a token each, some of which are surer than others; costs are those of a curve.

    Args:
      rates: by score, how often such a draft is right.
      shares: by score, how many of the drafts have it.
      drafting: milliseconds that a draft takes.
      interval: steps from one decision to the next.
    """

    rates: dict[float, float]
    shares: dict[float, float]
    drafting: float = 0.1
    interval: int = 10
    learns: bool = True
    verified: dict[float, list[bool]] = field(default_factory=dict)

    def run(self, one: Governor, curve: dict[int, float], num_steps: int = 600) -> float:
        """Speed by that of plain decoding."""
        rng, costs = random.Random(1), CostModel(curve)
        row: Any = SimpleNamespace(id=0, state={}, is_finished=False)
        plain = spent = 0.0
        for step in range(num_steps):
            is_deciding = step % self.interval == 0
            (budget,) = one.budgets([row], [DraftSize(4)]) if is_deciding else one.habit.budgets([DraftSize(4)])
            (score,) = rng.choices([*self.shares], [*self.shares.values()])
            is_right = rng.random() < self.rates[score]
            tree = scored(score) if budget else DraftTree.root(1)
            if is_deciding:
                (part,) = one.trimmed([row], [tree])
            else:
                (part,) = one.cut([row], [tree])
            self.verified.setdefault(score, []).append(len(part) > 1)
            tokens = (2, 9) if is_right and len(part) > 1 else (2,) if is_right else (9,)
            output: Any = SimpleNamespace(row=row, token_ids=tokens)
            drafting, other = self.drafting * bool(budget) / 1e3, costs.curve(len(part)) / 1e3
            spent += drafting + other
            plain += costs.curve(1) / 1e3 * len(tokens)
            if is_deciding:
                one.learn([part], [output], drafting_seconds=drafting, other_seconds=other)
                continue
            one.follow([output], [tree] if self.learns else ())
            steps = Steps()
            steps.add(1, len(part) - 1, len(tokens), drafting, other)
            one.follow_steps(steps)
        return plain / spent

    def share(self, score: float) -> float:
        """Of the drafts with a score, in the second half of the steps, those that were verified."""
        found = self.verified[score]
        return sum(found[len(found) // 2 :]) / (len(found) - len(found) // 2)


def test_drafts_with_scores_are_cut_by_what_such_scores_were_worth() -> None:
    """One factor for all of them kept many that were wrong, and few of those that were sure of many tokens."""
    world = Sure({0.95: 0.95, 0.7: 0.1}, {0.95: 0.5, 0.7: 0.5})
    world.run(governor(STEEP), STEEP)
    assert world.share(0.95) > 0.9
    assert world.share(0.7) < 0.1


def test_what_is_learned_between_decisions_is_used() -> None:
    """Decisions are so rare here that they alone learn next to nothing."""
    shares = {}
    for learns in (False, True):
        world = Sure({0.95: 0.02, 0.6: 0.95}, {0.95: 0.5, 0.6: 0.5}, interval=100, learns=learns)
        world.run(governor(STEEP), STEEP, 300)
        shares[learns] = world.share(0.95)
    assert shares[True] < 0.1 < 0.3 < shares[False]


def test_drafts_that_mostly_bring_nothing_are_made_for_those_that_are_sure() -> None:
    """One in five is, and says so: by the mean of all, none was worth the time of making it."""
    world = Sure({0.95: 0.95, 0.05: 0.02}, {0.95: 0.2, 0.05: 0.8}, drafting=0.5)
    assert world.run(governor(STEEP), STEEP) > 1.04
    assert world.share(0.95) > 0.9
    assert world.share(0.05) < 0.1
    never = Sure({0.95: 0.3, 0.05: 0.02}, {0.95: 0.2, 0.05: 0.8}, drafting=0.5)
    assert never.run(governor(STEEP), STEEP) > 0.97


def test_rows_share_what_a_step_is_worth() -> None:
    rows: Any = [SimpleNamespace(id=row, state={}) for row in range(3)]
    one = governor({1: 20.0, 3: 20.0, 4: 26.0, 5: 32.0, 6: 38.0, 8: 50.0})
    trees = [scored(0.95, 0.1), scored(0.1), DraftTree.root(7)]
    for _ in range(40):
        one.cut(rows, trees)
        for row, tree, text in zip(rows, trees, ((2,), (9,), (9,)), strict=True):
            came = SimpleNamespace(row=SimpleNamespace(id=row.id, state=row.state, is_finished=False), token_ids=text)
            one.follow([came], [tree])
    assert [tree.tokens for tree in one.cut(rows, trees)] == [(1, 2), (1,), (7,)]
