"""Lookahead: a naive reference for window and pool, and everything near the end of a row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drafting import begin, made
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import drafter_factory
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.iterate.jacobi import prompt_tokens
from foredraft.drafters.iterate.lookahead import GuessWindow, LookaheadDrafter
from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.engine.cost_model import CostModel
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.row import Row
from foredraft.engine.stats import StepSeconds
from foredraft.errors import ConfigError
from foredraft.methods.iterate import most_cells
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, decode, toy_model
from foredraft.tree import DraftSize
from toys import VOCAB_SIZE, target


def draft_of(pending: int, max_depth: int) -> GrowingDraft:
    return GrowingDraft(cast("Row", SimpleNamespace(pending=pending)), max_depth)


def test_columns_beyond_a_cut_give_no_ngram_and_start_anew() -> None:
    window = GuessWindow(3, 2, chain([8, 1, 2], repeat(0)).__next__, frozenset())
    draft = draft_of(9, 99)
    window.add_to(draft)
    window.advance(draft.tree(""), [0, 3, 4, 5])
    assert window.levels == [[1, 2], [3, 4, 5]]
    draft = draft_of(9, 2)
    window.add_to(draft)
    tree = draft.tree("")
    assert tree.depth == 2
    by_token = {token: node for node, token in enumerate(tree.tokens)}
    choices = [0] * len(tree)
    choices[by_token[3]], choices[by_token[4]] = 33, 34
    assert window.advance(tree, choices) == [(9, 3, 33), (1, 4, 34)]
    assert window.levels == [[4, 5], [33, 34, 0]]


def test_ends_and_failures_are_never_guessed() -> None:
    tokens = count(50)
    window = GuessWindow(2, 2, lambda: next(tokens), frozenset({50, 7}))
    assert window.levels == [[51, 52]]
    draft = draft_of(9, 99)
    window.add_to(draft)
    assert window.advance(draft.tree(""), [1, 7, -1]) == []
    assert window.levels == [[52], [53, 54]]  # the end, and the token that there was not, are replaced


# -- the whole method, the slow way --------------------------------------------------------------------------------


@dataclass
class NaiveLookahead:
    """Published lookahead in lists of tokens, one forward per cell; no tree, no cache, no merging."""

    model: Any
    row: Any
    size: int
    ngram_size: int
    limit: int
    learns_text: bool
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    text: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = prompt_tokens(self.row)
        self.levels = [[next(tokens) for _ in range(self.size + self.ngram_size - 3)]]
        self.text = list(self.row.token_ids)
        self.learn(len(self.text))

    def next_token(self, path: tuple[int, ...]) -> int:
        """The argmax behind the text and a path."""
        text = (*self.text, *path)
        if text not in self.known:
            with torch.no_grad():
                self.known[text] = int(self.model(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        return self.known[text]

    def insert(self, key: int, value: tuple[int, ...]) -> None:
        listed = self.pool.setdefault(key, [])
        if value in listed:
            listed.remove(value)
        listed.append(value)
        del listed[: -self.limit]

    def learn(self, num_new: int) -> None:
        length = self.ngram_size
        for start in range(len(self.text) - length + 1):
            if self.learns_text and start + length > len(self.text) - num_new:
                self.insert(self.text[start], tuple(self.text[start + 1 : start + length]))

    def step(self) -> int:
        """One step; the number of tokens that it adds."""
        columns = range(len(self.levels[0]) + 1)
        paths = [(*self.levels[0][:j], *(level[j] for level in self.levels[1:])) for j in columns]
        drafts = [*paths, *self.pool.get(self.text[-1], ())]
        newest = [self.next_token(path) for path in paths]
        emitted = [self.next_token(())]
        while any(path[: len(emitted)] == tuple(emitted) for path in drafts):
            emitted.append(self.next_token(tuple(emitted)))
        if len(self.levels) == self.ngram_size - 1:
            for j in columns:
                key = self.text[-1] if j == 0 else self.levels[0][j - 1]
                self.insert(key, (*(level[j] for level in self.levels[1:]), newest[j]))
            later = [*self.levels[1:], newest]
            self.levels = [later[0][1:], *later[1:]]
        else:
            self.levels = [level[1:] for level in [*self.levels, newest]]
        self.text += emitted
        self.learn(len(emitted))
        return len(emitted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("learns_text", [False, True])
@pytest.mark.parametrize(
    ("size", "ngram_size", "limit"),
    [(5, 4, 3), (1, 3, 1), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((3, 3, 2), (4, 2, 7)))],
)
def test_window_pool_and_steps_equal_a_naive_reference(
    size: int, ngram_size: int, limit: int, learns_text: bool
) -> None:
    model = toy_model(VOCAB_SIZE)
    drafter = made("lookahead", ngram_size - 1, window_size=size, guess_set_size=limit, pool_from_prompt=learns_text)
    engine = Engine(CausalLM(model, execution="eager"), drafter)
    row = engine.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=100))[0]
    naive = NaiveLookahead(model, row, size, ngram_size, limit, learns_text)
    engine.step()
    for _ in range(14):
        assert len(engine.step()[0].token_ids) == naive.step()
        assert row.token_ids == naive.text
        pool = row.state[drafter]
        assert pool.window.levels == naive.levels
        known = {token: pool.continuations(token)[::-1] for token in range(VOCAB_SIZE)}
        assert {token: found for token, found in known.items() if found} == naive.pool
    assert len(row.output_ids) > 14  # some of it was right


# -- settings ------------------------------------------------------------------------------------------------------


def test_the_standard_rule_takes_the_tree() -> None:
    trace = decode(target(), made("lookahead", 3), [(PROMPTS[0], SAMPLED)], config=EngineConfig(acceptance="standard"))
    assert len(trace.outputs["0.0"]) == SAMPLED.max_tokens


def test_the_node_limit_holds_while_the_window_fills_and_afterwards() -> None:
    sizes = []

    class Counting(LookaheadDrafter):
        def propose_row(self, row: Any, budget: int) -> Any:
            tree = super().propose_row(row, budget)
            sizes.append(len(tree))
            return tree

    limit = most_cells(3, 5) + 4
    decode(
        target(),
        made("lookahead", 5, cls=Counting, window_size=3, guess_set_size=9, max_draft_nodes=limit),
        [(PROMPTS[0], GREEDY)],
    )
    assert most_cells(3, 5) - 5 < max(sizes) <= limit
    assert [most_cells(4, 3), most_cells(1, 4), most_cells(7, 1)] == [12, 6, 7]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_draft_nodes": 27}, "max_draft_nodes=27 is too small.*raise max_draft_nodes to 28"),
        ({"length_policy": "heuristic"}, "length_policy is 'heuristic'; choose one of governed, fixed"),
        ({"rejection_sample_method": "block"}, "accepts only chains, and method 'lookahead' drafts trees"),
    ],
)
def test_keys_out_of_range_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(method="lookahead", **keys)


@pytest.mark.parametrize("method", ["lookahead", "token_recycling"])
def test_targets_that_verify_chains_only_are_refused(method: str) -> None:
    chains_only: Any = SimpleNamespace(supports_trees=False, name="some model", vocab_size=9)
    with pytest.raises(ConfigError, match="drafts trees, and some model can only verify chains"):
        drafter_factory(SpeculativeConfig(method=method), DrafterContext(chains_only))


class Costed(Governor):
    """Learns steps at costs of its own: drafts for nothing, and so much of a plain step for every drafted node."""

    def __init__(self, drafter: Any, node: float) -> None:
        super().__init__(CostModel({1: 1.0, 65: 1.0 + 64 * node}), drafter.facts)
        self._node = node
        self.has_window: list[bool] = []

    def observe(self, trees: Any, outputs: Any, seconds: StepSeconds) -> None:
        self.has_window.append(any(tree.is_whole for tree in trees))
        verifying = 1.0 + self._node * sum(len(tree) - 1 for tree in trees)
        super().observe(trees, outputs, StepSeconds(1e-3, verifying))


def governed(drafter: Any, node: float) -> Costed:
    """The governor of a drafter that has drafted for all prompts, one after the other."""
    governor = Costed(drafter, node)
    engine = Engine(target(), drafter, EngineConfig(max_num_seqs=1), governor=governor)
    for prompt in PROMPTS:
        engine.add_request(prompt, replace(GREEDY, max_tokens=60, seed=0))  # of the windows
    list(engine.run())
    return governor


def test_a_window_runs_where_it_brings_more_than_it_costs() -> None:
    """Its cells are the only drafts here."""
    late = governed(made("lookahead", 3, window_size=6, guess_set_size=0), 1e-4).has_window[100:]
    assert sum(late) > 0.9 * len(late) > 20


def test_a_window_rests_where_it_costs_more_than_it_brings() -> None:
    """While guesses, which are fewer nodes and more often right, go on."""
    governor = governed(made("lookahead", 3, window_size=6, guess_set_size=1), 0.1)
    late = governor.has_window[60:]
    assert sum(late) < 0.1 * len(late)
    assert governor.totals.num_drafted > 0.5 * governor.totals.num_steps


def test_guesses_go_on_while_the_window_rests() -> None:
    drafter = made("lookahead", 3, window_size=4)
    params = replace(GREEDY, seed=0)  # it draws the window, which may not be the guess
    (row,) = Engine(target(), drafter).add_request([5, 6, 7, 8, 9, 5], params)
    begin(drafter, [row])
    whole = drafter.propose_row(row, DraftSize(3))
    assert whole.is_whole
    assert len(whole) > 4
    without = DraftSize(3)
    without.arm = 0
    alone = drafter.propose_row(row, without)
    assert not alone.is_whole
    assert alone.tokens == (5, 6, 7, 8)
    again = drafter.propose_row(row, DraftSize(3))
    assert again.is_whole
    assert len(again) > 4
