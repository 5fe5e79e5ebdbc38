"""Medusa, Hydra and Hydra++ with heads that were fitted to a toy target: drafts are accepted at every depth, no token
changes, every forward is accounted for, and what drafters keep of rows is what a fresh pass over their texts gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.head_drafter import HeadDrafter
from foredraft.engine.drafter import Drafter, Features, PromptChunk
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.heads.medusa_hydra import HydraHeads, PrefixLayer
from foredraft.methods.rank_tree import RankTree
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import CacheGroup
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, decode
from mutants import Apply, with_arguments
from toy_heads import HIDDEN, NUM_HEADS, VOCAB_SIZE, hydra_heads, medusa_heads, states_along, target

KINDS = ("medusa", "medusa-shared", "hydra", "hydra++")
TREES = {
    "published": RankTree.published("mc_sim_7b_63"),
    "cartesian": RankTree.cartesian((3, 2, 1, 1)),
    "chain": RankTree.of([[0] * depth for depth in range(1, NUM_HEADS + 1)]),
    "wide": RankTree.cartesian((9,)),
    "grown": RankTree.grown([[0.7, 0.1, 0.05]] * NUM_HEADS, 16),
}
PARAMS = replace(GREEDY, max_tokens=20)


def heads_of(kind: str) -> Any:
    if kind.startswith("medusa"):
        return medusa_heads(kind == "medusa")
    return hydra_heads(kind == "hydra++")


def make(kind: str, tree: RankTree = TREES["grown"], max_depth: int = NUM_HEADS, **options: Any) -> Drafter:
    growth: dict[str, Any] = {"tree": tree, "target_vocab_size": VOCAB_SIZE, "max_depth": max_depth, **options}
    return MultiHeadDrafter(heads_of(kind), target().num_layers, **growth)


def run(drafter: Drafter, params: SamplingParams = PARAMS, after: Callable[[Engine], None] | None = None) -> list[Row]:
    """All prompts at once; two rows fit, so that they come and go."""
    engine = Engine(target(), drafter, EngineConfig(max_num_seqs=3, prefill_chunk_size=4))
    rows = [row for prompt in PROMPTS for row in engine.add_request(prompt, params)]
    while engine.has_unfinished:
        engine.step()
        if after is not None:
            after(engine)
    return rows


# -- what is accepted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["medusa-shared", "hydra++"])
def test_drafts_of_sampled_rows_are_accepted_at_every_depth(kind: str) -> None:
    params = replace(SAMPLED, max_tokens=20)
    plain = [row.output_ids for row in run(EmptyDrafter(), params)]
    rows = run(make(kind), params)
    assert [row.output_ids for row in rows] == plain
    accepted = sum((row.stats.acceptance_histogram for row in rows), Counter())
    assert sum(count for length, count in accepted.items() if length >= NUM_HEADS - 1) >= 5
    assert max(accepted) == NUM_HEADS
    assert sum(row.stats.num_emitted_tokens for row in rows) / sum(row.stats.num_steps for row in rows) > 2.5


def ranks_along(kind: str, text: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For every token t, the ranks that the heads give to the tokens t + 2, t + 3, ... of a greedy text."""
    states, ids = states_along(target(), text), torch.tensor(text)
    heads = heads_of(kind)
    table = target().shadow.get_input_embeddings().weight
    found: list[list[int]] = [[] for _ in text]
    contexts = heads.contexts(states)
    output = target().shadow.get_output_embeddings()
    for head in range(NUM_HEADS):
        answers = ids[2 + head :]
        if isinstance(heads, HydraHeads):
            logits = heads.along(head, contexts, table[ids])[: len(answers)]
        else:
            logits = heads(states, head + 1, output)[: len(answers), head]
        own = logits.gather(1, answers[:, None])
        for t, rank in enumerate((logits > own).sum(1).tolist()):
            found[t].append(rank)
    return [tuple(ranks) for ranks in found]


def steps_expected(ranks: list[tuple[int, ...]], tree: RankTree, num_prompt: int, total: int) -> int:
    """Walks a text with the ranks of its tokens: as far as its path lies in the tree, and one token more."""
    paths, length, steps = set(tree.paths), num_prompt, 0
    while length < total:
        accepted = 0
        known = ranks[length - 2] if length > 1 else ()
        while accepted < min(len(known), total - length - 1) and known[: accepted + 1] in paths:
            accepted += 1
        length, steps = length + accepted + 1, steps + 1
    return steps


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "tree"), [(KINDS[place % len(KINDS)], tree) for place, tree in enumerate(TREES)])
def test_every_tree_makes_the_forwards_that_its_ranks_explain(kind: str, tree: str) -> None:
    """Counted without the engine: from the ranks that heads give along the finished texts."""
    plain = [row.output_ids for row in run(EmptyDrafter())]
    rows = run(make(kind, TREES[tree]))
    assert [row.output_ids for row in rows] == plain
    for row in rows:
        ranks = ranks_along(kind, tuple(row.token_ids))
        expected = steps_expected(ranks, TREES[tree], row.num_prompt_tokens, len(row.token_ids))
        assert row.stats.num_steps == expected
    if tree != "wide":
        assert sum(row.stats.num_steps for row in rows) < 0.6 * sum(map(len, plain))


# -- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "acceptance"), [("medusa", "match"), ("hydra++", "standard"), ("medusa", "typical")])
def test_siblings_that_a_distribution_does_not_have_are_left_out(kind: str, acceptance: str) -> None:
    """Two possible tokens per node, and trees that ask for three: 2 + 4 + 4 + 4 nodes are left of 3 + 6 + 6 + 6."""
    params = replace(SAMPLED, top_p=1.0, top_k=2, max_tokens=12)
    drafter, sizes = make(kind, TREES["cartesian"], acceptance=acceptance), set()
    propose = drafter.propose

    def noted(rows: Any, budgets: Any) -> Any:
        trees = propose(rows, budgets)
        sizes.update(len(tree) for tree, budget in zip(trees, budgets, strict=True) if budget >= NUM_HEADS)
        return trees

    drafter.propose = noted
    engine = Engine(target(), drafter, EngineConfig(acceptance=acceptance))
    rows = [row for prompt in PROMPTS for row in engine.add_request(prompt, params)]
    list(engine.run())
    assert sizes == {1, 1 + 2 + 4 + 4 + 4}
    if acceptance == "match":
        plain = decode(target(), EmptyDrafter(), [(prompt, params) for prompt in PROMPTS]).outputs
        assert [tuple(row.output_ids) for row in rows] == list(plain.values())


# -- what is kept of rows --------------------------------------------------------------------------------------------


class States(Features):
    """The target's last hidden states (T, H) of a chunk."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states

    def last_hidden(self, nodes: Sequence[int]) -> torch.Tensor:
        return self.states[list(nodes)]


@torch.inference_mode()
def take_in(drafter: Any, *chunks: tuple[Row, torch.Tensor, int]) -> None:
    """Give a drafter the states of the next tokens of rows: (row, states, index of the first of these tokens)."""
    read = [PromptChunk(start, len(states), States(states)) for _, states, start in chunks]
    drafter.start([row for row, _, _ in chunks], read)


def check_contexts(engine: Engine) -> None:
    """Every decoding row has the context vector, and the keys and values, that a fresh pass over its text gives."""
    drafter = engine.drafter
    contexts = drafter
    for row in engine.decoding_rows:
        text = tuple(row.token_ids[:-1])
        if not text:
            assert not contexts.has_state(row)
            continue
        states = states_along(target(), text)
        want = states
        if contexts.heads.prefix is not None:
            with torch.inference_mode():
                want = hydra_heads(True).contexts(states)
            fresh = make("hydra++")
            fresh.cache.add_rows()
            take_in(fresh, (cast("Row", SimpleNamespace(slot=0, state={})), states, 0))
            assert contexts.cache.lengths[row.slot] == len(text)
            for got, expected in zip(
                contexts.cache.export(row.slot, len(text)), fresh.cache.export(0, len(text)), strict=True
            ):
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        torch.testing.assert_close(contexts.last_of([row])[0], want[-1], rtol=0, atol=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_what_is_kept_of_a_row_equals_a_fresh_pass(kind: str) -> None:
    """After every step, for samples of one prompt too, while rows come and go and prompts are read in chunks."""
    run(make(kind), replace(SAMPLED, n=2), after=check_contexts)


def test_a_row_whose_states_are_no_numbers_leaves_nothing_behind() -> None:
    """What it wrote lies behind the columns of the next row in its place, masked: 0 * NaN must not be."""
    contexts = make("hydra++")
    caches = CacheGroup([contexts.cache])
    long, bad, good = (cast("Row", SimpleNamespace(slot=slot, token_ids=[1] * 9, state={})) for slot in (0, 1, 1))
    assert [caches.add(), caches.add()] == [long.slot, bad.slot]
    states = states_along(target(), (3, 1, 4, 1, 5, 9, 2))
    with torch.inference_mode():
        take_in(contexts, (long, states[:6], 0), (bad, torch.full((6, HIDDEN), torch.nan, dtype=torch.float64), 0))
        caches.remove(bad.slot)
        assert caches.add() == good.slot
        take_in(contexts, (good, states[:2], 0))
        take_in(contexts, (long, states[6:], 6), (good, states[2:3], 2))  # attention runs over seven columns of both
        want = hydra_heads(True).contexts(states[:3])[-1]
    torch.testing.assert_close(contexts.last_of([good])[0], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_prefixes_of_earlier_rows_are_used(kind: str) -> None:
    """A second turn that begins with the first reads what is new, and one token more."""
    store, drafter = PrefixStore(4), make(kind)

    def turn(prompt: list[int]) -> Row:
        engine = Engine(target(), drafter, EngineConfig(), prefixes=store)
        (row,) = engine.add_request(prompt, PARAMS)
        while engine.has_unfinished:
            engine.step()
            check_contexts(engine)
        return row

    first = turn(list(PROMPTS[0]))
    prompt = [*first.token_ids, 3, 1, 4, 1]
    second = turn(prompt)
    engine = Engine(target(), EmptyDrafter(), EngineConfig())
    (plain,) = engine.add_request(prompt, PARAMS)
    list(engine.run())
    assert second.output_ids == plain.output_ids
    known = len(first.token_ids) - 1
    lag = 0 if kind == "medusa" else 2 * NUM_HEADS  # a row that ends is not shown its last step
    assert known - lag <= second.num_cached_tokens <= known
    again = turn(list(first.token_ids[: first.num_prompt_tokens]))  # the whole prompt is known: its end is read again
    assert again.num_cached_tokens == first.num_prompt_tokens - 2
    assert again.output_ids == first.output_ids


def test_an_earlier_state_of_the_target_is_read_where_heads_want_it() -> None:
    """``hidden_state_offset`` 1: the input of the last layer."""
    heads = HydraHeads(replace(hydra_heads(False).shape, offset=1)).double().requires_grad_(False)
    drafter = MultiHeadDrafter(
        heads, target().num_layers, tree=TREES["grown"], target_vocab_size=VOCAB_SIZE, max_depth=NUM_HEADS
    )
    needs = drafter.needs(target(), target().new_cache())
    assert needs.layer_inputs == (1,)
    assert not needs.last_hidden
    assert [row.output_ids for row in run(drafter)] == [row.output_ids for row in run(EmptyDrafter())]


# -- faults ----------------------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[str, Apply]] = {
    "rows get the states of the next one": (
        "medusa",
        with_arguments(HeadDrafter, "_take_in", lambda call: {"inputs": [*call.inputs[1:], *call.inputs[:1]]}),
    ),
    "positions count from each chunk": (
        "hydra++",
        with_arguments(PrefixLayer, "placed", lambda call: {"positions": call.positions - call.positions[:, :1]}),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_features_and_positions_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with a fresh pass; tokens never change, so that nothing else would show it."""
    kind, apply = FAULTS[fault]
    apply(monkeypatch)
    with pytest.raises(AssertionError):
        run(make(kind), after=check_contexts)
