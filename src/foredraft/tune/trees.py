"""Search for the draft tree of heads: grown from the accuracy of their candidates, sized by measured costs of steps."""

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
"""Rank of every token outside the candidates of a tree."""

_CHUNK = 512


@dataclass(frozen=True)
class Hits:
    """Ranks of the target's own continuation among the candidates of a drafter.

    Args:
      ranks: one entry per position. Element d is the rank, among the candidates of head d, of the
        token d + 2 positions later; `MISS` if the token is not among the first candidates. Entries near the end of a
        text are shorter.
      num_heads: number of heads of the drafter, or of levels that were recorded.
      are_whole: False if every entry ends at its first rank other than 0.
    """

    ranks: tuple[Ranks, ...]
    num_heads: int
    are_whole: bool = True

    @property
    def accuracies(self) -> list[list[float]]:
        """Table ``[d][r]``: share of positions at which the candidate of rank r of head d was right, up to
        `MAX_SIBLINGS`.

        Every mean is over the positions that have such a token. Later heads have fewer such positions.
        """
        table = []
        for depth in range(self.num_heads):
            known = [ranks[depth] for ranks in self.ranks if depth < len(ranks)]
            table.append([known.count(rank) / max(1, len(known)) for rank in range(MAX_SIBLINGS)])
        return table

    def tokens_per_step(self, tree: RankTree) -> float:
        """Return the mean number of tokens per step, bonus included, over all positions with enough tokens after them.

        The result does not assume that depths are independent. But the tree was grown from the same positions. If the
        entries are not whole, each depth is assumed to be right or wrong independently of the others.
        """
        if not self.are_whole:
            return tree.value(self.accuracies)
        paths = set(tree.paths)
        whole = [ranks for ranks in self.ranks if len(ranks) >= min(tree.depth, self.num_heads)]
        return 1.0 + sum(_accepted(ranks, paths) for ranks in whole) / max(1, len(whole))


def _accepted(ranks: Ranks, paths: set[Ranks]) -> int:
    """Return the length of the path that is in the tree."""
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
    """Decode prompts and return the ranks of the target's tokens among the candidates of the heads.

    Args:
      drafter: the drafter with the heads. The drafter drafts while the prompts are decoded, which does not change the
        output.
      params: sampling parameters. The parameters also decide how candidates are ranked.
      interrupted: event that is set if Ctrl-C ended the decoding early; without one, KeyboardInterrupt is raised.

    Exactness: the output equals that of the target. Randomness: that of ``params``.
    Raises: ConfigError if the outputs are too short.
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
    """Return the same ranks for drafters whose candidates depend on their own drafts (EAGLE), from the trees that they
    propose.

    Every tree contains all candidates of the nodes on its best path. The accuracy of a candidate is therefore counted
    only where the best candidates before it were right. A level that was never reached counts as never right.

    Args:
      drafter: a drafter with a `Growth`.
      depth: number of levels to record.
      interrupted: see `measured_hits`.
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
        raise ConfigError("nothing was drafted for these prompts; raise max-new-tokens, or use other prompts")
    return Hits(tuple(found), depth, are_whole=False)


def _ranks_in(tree: DraftTree, text: Sequence[int]) -> Ranks:
    """Return the ranks at which a text passes through a tree, up to the first that is not 0."""
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
    """Return the ranks at every position from which a generated token can be predicted."""
    tokens, first = row.token_ids, max(0, row.num_prompt_tokens - 2)
    states = states_along(target, drafter.needs(target, target.new_cache()), tokens)
    token_ids = torch.tensor(tokens, device=states.device)
    found: list[list[int]] = [[] for _ in range(len(tokens) - first)]
    for depth in range(num_heads):
        last = len(tokens) - 2 - depth  # head `depth` predicts token t + 2 + depth from position t
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
    """Return the states of the target after every token, (T, H), as the heads read them, computed chunk by chunk."""
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
    """A tree of some size, and the tokens and cost of a step with it.

    Args:
      tokens_per_step: counted mean number of tokens, bonus included.
      cost: seconds of a step (verification and drafting) relative to a plain forward pass.
    """

    tree: RankTree
    tokens_per_step: float
    cost: float

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.tree)

    @property
    def speedup(self) -> float:
        """Speed relative to plain decoding, counting only forward passes and drafting."""
        return self.tokens_per_step / self.cost


def sizes_to_measure(most: int) -> list[int]:
    """Return the numbers of nodes at which forward passes are timed: small numbers densely, larger ones in wider
    steps."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128) if size < most]
    return [*sizes, most]


def measured_costs(
    target: CausalLM, drafter: Any, tree: RankTree, prompt: Sequence[int], repeats: int = 9
) -> tuple[CostCurve, CostCurve]:
    """Time verifications and proposals of a tree at several sizes, after 256 tokens of context.

    The shortest of several timings counts, and a size never costs more than a larger one. Disturbances of the machine
    can only lengthen a timing.

    Args:
      drafter: a drafter with a `Growth` that is not in use.
      tree: the largest tree.
      prompt: prompt of the row for which trees are proposed.

    Returns: curves of the seconds of verifying and of proposing a tree, by number of nodes.
    """
    sizes = sizes_to_measure(len(tree))
    verify = forward_curve(target, sizes, CONTEXT, repeats, of=min)
    drafter.growth.use(tree)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=1))
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tree.depth + 4, ignore_eos=True))
    while not engine.decoding_rows:
        engine.step()
    engine.step()  # now every row has a state to draft from
    rows = engine.decoding_rows
    draft = {}
    with torch.inference_mode():
        for size in sizes:
            budgets = [DraftSize(tree.depth, size)] * len(rows)
            times = [seconds_of(drafter.propose, target.device, rows, budgets) for _ in range(repeats + 1)]
            draft[size] = min(times[1:])  # the first call is a warm-up
    engine.abort(rows[0].request_id)
    return verify.rising(), CostCurve(draft).rising()


def search(
    hits: Hits, max_nodes: int, costs_of: Callable[[RankTree], tuple[CostCurve, CostCurve]], num_nodes: int | None
) -> tuple[Sized, list[Sized]]:
    """Grow trees from the accuracies, and choose the size with the most tokens per second.

    Args:
      max_nodes: number of nodes of the largest tree, root included.
      costs_of: function that times steps with a tree; see `measured_costs`.
      num_nodes: size to use whatever it costs; None to choose one.

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
