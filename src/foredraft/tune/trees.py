"""The draft tree of heads: grown from what their candidates get right, sized by what steps cost here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.engine.cost_model import CostCurve
from foredraft.engine.costs import CONTEXT, forward_curve, seconds_of
from foredraft.engine.drafter import DraftSize, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.rank_tree import MAX_SIBLINGS, Ranks, RankTree
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.nodes import Wanted
from foredraft.tree import DraftTree
from foredraft.tune.walk import decoded_rows

MISS = MAX_SIBLINGS
"""Stands for every rank that no tree tries."""

_CHUNK = 512


@dataclass(frozen=True)
class Hits:
    """At which rank the target's own continuation stood.

    Args:
      ranks: one entry per place in the texts: the rank of the next token but one among the candidates of the first
        head, of the one after it among those of the second, and so on; `MISS` where it was none of the first.
      num_heads: of the drafter, or levels that were looked at; entries near the end of a text are shorter.
      are_whole: entries do not end where the first rank is another one than 0.
    """

    ranks: tuple[Ranks, ...]
    num_heads: int
    are_whole: bool = True

    @property
    def accuracies(self) -> list[list[float]]:
        """``[d][r]``: share of the places at which the candidate of rank r of head d was right, up to `MAX_SIBLINGS`.

        The means are over the places that have a token there, which are fewer for later heads.
        """
        table = []
        for depth in range(self.num_heads):
            known = [ranks[depth] for ranks in self.ranks if depth < len(ranks)]
            table.append([known.count(rank) / max(1, len(known)) for rank in range(MAX_SIBLINGS)])
        return table

    def tokens_per_step(self, tree: RankTree) -> float:
        """Mean tokens of a step, the bonus included, counted at every place where the whole tree could have been right.

        No independence is assumed; but these are the places that the accuracies are from. Where entries are not whole,
        depths are taken to be right or wrong independently.
        """
        if not self.are_whole:
            return tree.value(self.accuracies)
        paths = set(tree.paths)
        whole = [ranks for ranks in self.ranks if len(ranks) >= min(tree.depth, self.num_heads)]
        return 1.0 + sum(_accepted(ranks, paths) for ranks in whole) / max(1, len(whole))


def _accepted(ranks: Ranks, paths: set[Ranks]) -> int:
    """The length of a path inside a tree."""
    length = 0
    while length < len(ranks) and ranks[: length + 1] in paths:
        length += 1
    return length


def measured_hits(
    target: CausalLM,
    drafter: MultiHeadDrafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    interrupted: Event | None = None,
) -> Hits:
    """Decode prompts and see where the target's tokens stood among the candidates of the heads.

    Args:
      drafter: it drafts while the texts are made, which changes nothing about them.
      params: how texts are sampled. Candidates are ranked as they would be for a row with these parameters.
      interrupted: set where Ctrl-C ended the texts early; without one, the interrupt goes on.

    Exactness: texts are the target's own. Randomness: that of ``params``.
    Raises: ConfigError for texts that are too short to tell anything.
    """
    rows = decoded_rows(target, drafter, prompts, params, interrupted=interrupted)
    num_heads = drafter.heads.num_heads
    found = [ranks for row in rows for ranks in _ranks_of(target, drafter, row, num_heads)]
    if not any(len(ranks) == num_heads for ranks in found):
        raise ConfigError(f"the texts are too short for {num_heads} heads; raise max-new-tokens, or give other prompts")
    return Hits(tuple(found), num_heads)


def watched_hits(
    target: CausalLM,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    depth: int,
    interrupted: Event | None = None,
) -> Hits:
    """The same for drafters whose guesses are made of their own drafts (EAGLE): by the trees that they propose.

    Every tree has all candidates of the nodes on its best path, so how often a candidate is right is counted where the
    best ones stand before it; a level that no text has come to counts as never right.

    Args:
      drafter: one with a `Growth`.
      depth: levels that are looked at.
      interrupted: as of `measured_hits`.
    """
    comb = [(0,) * above + (rank,) for above in range(depth) for rank in range(MAX_SIBLINGS)]
    drafter.growth.use(RankTree.of(comb, "all candidates of the best path"))
    propose = drafter.propose
    notes: list[tuple[Row, int, DraftTree]] = []

    def noted(rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        trees: list[DraftTree] = propose(rows, budgets)
        notes.extend((row, len(row.token_ids), tree) for row, tree in zip(rows, trees, strict=True))
        return trees

    drafter.propose = noted
    try:
        decoded_rows(target, drafter, prompts, params, interrupted=interrupted)
    finally:
        del drafter.propose
    found = [ranks for row, start, tree in notes if (ranks := _ranks_in(tree, row.token_ids[start:]))]
    if not found:
        raise ConfigError("nothing was drafted in these texts; raise max-new-tokens, or give other prompts")
    return Hits(tuple(found), depth, are_whole=False)


def _ranks_in(tree: DraftTree, text: Sequence[int]) -> Ranks:
    """At which ranks a text goes through a tree, up to the first that is not 0."""
    ranks: list[int] = []
    node = 0
    for token in text:
        children = tree.children[node]
        if not children:
            break
        child = tree.child(node, token)
        ranks.append(MISS if child is None else children.index(child))
        if child is None or ranks[-1]:
            break
        node = child
    return tuple(ranks)


@torch.inference_mode()
def _ranks_of(target: CausalLM, drafter: MultiHeadDrafter, row: Row, num_heads: int) -> list[Ranks]:
    """Ranks at every place from which a generated token can be guessed."""
    tokens, first = row.token_ids, max(0, row.num_prompt_tokens - 2)
    states = states_along(target, drafter.needs(target, target.new_cache()), tokens)
    token_ids = torch.tensor(tokens, device=states.device)
    found: list[list[int]] = [[] for _ in range(len(tokens) - first)]
    for depth in range(num_heads):
        last = len(tokens) - 2 - depth  # from place t the token t + 2 + depth is guessed
        if last <= first:
            break
        logits = drafter.along(depth, states, token_ids, first)
        positions = range(first + 2 + depth, len(tokens))
        ranked = drafter.growth.ranked(logits, row.sampler, positions, MAX_SIBLINGS)
        for i, (best, position) in enumerate(zip(ranked, positions, strict=True)):
            found[i].append(best.index(tokens[position]) if tokens[position] in best else MISS)
    return [tuple(ranks) for ranks in found if ranks]


@torch.inference_mode()
def states_along(target: CausalLM, needs: Needs, tokens: Sequence[int]) -> torch.Tensor:
    """States of the target after every token of a text, (T, H), as heads read them; computed chunk by chunk."""
    wanted, cache, parts = Wanted(needs.last_hidden, needs.layer_inputs), target.new_cache(1), []
    for start in range(0, len(tokens), _CHUNK):
        nodes = Nodes.from_chains([tokens[start : start + _CHUNK]])
        output = target.forward_with(wanted, nodes, cache, keep=slice(0, 0))
        cache.commit([range(nodes.width)])
        states = output.last_hidden if needs.last_hidden else output.layer_inputs[needs.layer_inputs[0]]
        assert states is not None
        parts.append(states[0].clone())
    return torch.cat(parts)


@dataclass(frozen=True)
class Sized:
    """A tree of some size, and what a step with it costs and brings.

    Args:
      tokens_per_step: counted, the bonus included.
      cost: seconds of a step, verification and drafting, relative to those of a plain forward.
    """

    tree: RankTree
    tokens_per_step: float
    cost: float

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return len(self.tree)

    @property
    def speedup(self) -> float:
        """Speed relative to plain decoding, as far as forwards and drafting decide it."""
        return self.tokens_per_step / self.cost


def sizes_to_measure(most: int) -> list[int]:
    """Nodes at which forwards are timed: all small numbers, then steps of a quarter."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128) if size < most]
    return [*sizes, most]


def measured_costs(
    target: CausalLM, drafter: Any, tree: RankTree, prompt: Sequence[int], repeats: int = 9
) -> tuple[CostCurve, CostCurve]:
    """Time verifications and proposals of every size of a tree, after 256 tokens of context.

    The shortest of several timings counts, and no size counts for more than a larger one: what disturbs the machine
    only ever adds.

    Args:
      drafter: one with a `Growth`, that is not in use.
      tree: the largest one.
      prompt: of the row for which trees are proposed.

    Returns: seconds of verifying, and of proposing a tree of n nodes, by n.
    """
    sizes = sizes_to_measure(len(tree))
    verify = forward_curve(target, sizes, CONTEXT, repeats, of=min)
    drafter.growth.use(tree)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=1))
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tree.depth + 4, ignore_eos=True))
    while not engine.decoding_rows:
        engine.step()
    engine.step()  # by now every row has a state to draft from
    rows = engine.decoding_rows
    draft = {}
    with torch.inference_mode():
        for size in sizes:
            budgets = [DraftSize(tree.depth, size)] * len(rows)
            times = [seconds_of(drafter.propose, target.device, rows, budgets) for _ in range(repeats + 1)]
            draft[size] = min(times[1:])  # the first one warms up
    engine.abort(rows[0].request_id)
    return verify.rising(), CostCurve(draft).rising()


def search(
    hits: Hits, max_nodes: int, costs_of: Callable[[RankTree], tuple[CostCurve, CostCurve]], num_nodes: int | None
) -> tuple[Sized, list[Sized]]:
    """Grow trees from the accuracies and choose the size that brings the most tokens per second.

    Args:
      max_nodes: of the largest tree, root included.
      costs_of: times steps with a tree; see `measured_costs`.
      num_nodes: take this size, whatever it costs.

    Returns: the best size, and all sizes that were compared.
    """
    tree = RankTree.grown(hits.accuracies, num_nodes or max_nodes)
    verify, draft = costs_of(tree)
    sizes = [
        Sized(small, hits.tokens_per_step(small), (verify.at(size) + draft.at(size)) / verify.at(1))
        for size in range(2, len(tree) + 1)
        for small in [tree.first(size)]
    ]
    best = sizes[-1] if num_nodes else max(sizes, key=lambda one: (one.speedup, -one.num_nodes))
    return best, sizes
