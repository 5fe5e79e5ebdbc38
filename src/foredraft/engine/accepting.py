"""The acceptance rules over the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.accept.rules import RejectionNoise, Verdict, block, match, rejection, typical, walk
from foredraft.config.acceptance import BLOCK, RULES, STANDARD, TYPICAL, TypicalLimits
from foredraft.engine.row import Row
from foredraft.model.nodes import Logits, NodeLogits
from foredraft.sampling.distribution import argmax, choose, choose_at, probs
from foredraft.tree import DraftTree
from foredraft.upload import upload

Choices = list[tuple[int, ...]]
"""The target's own token at every node of every row; -1 where there is no usable distribution."""

BY_DRAFT = {STANDARD.name: rejection, BLOCK.name: block}
"""Rules that are handed the draft with its distribution, the target's distribution at a node, and noise."""


def accept_rows(
    rule: str,
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    logits: Logits,
    choices: Choices | None = None,
    limits: TypicalLimits | None = None,
) -> list[Verdict]:
    """Walk every tree by the acceptance rule; greedy rows by the argmax under every rule.

    Args:
      rule: a name of `foredraft.config.acceptance.RULES`.
      logits: of the nodes of these rows, or of more.
      choices: from `choose_all`, where it was called already.
      limits: of the rule "typical".

    Returns: one verdict per row; its ``next_token`` is -1 for a row without a usable distribution.
    """
    if RULES[rule].keeps_tokens:
        return match_rows(rows, trees, logits, choices)
    listed = as_list(logits)
    greedy = [i for i, row in enumerate(rows) if row.sampler.is_greedy]
    verdicts = {}
    if greedy:
        of_greedy = listed if len(greedy) == len(listed) else listed.of(greedy)
        walked = match_rows([rows[i] for i in greedy], [trees[i] for i in greedy], of_greedy)
        verdicts = dict(zip(greedy, walked, strict=True))
    for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        if i not in verdicts:
            verdicts[i] = _accept_sampled(rule, row, tree, listed[i], limits)
    return [verdicts[i] for i in range(len(rows))]


def _accept_sampled(
    rule: str, row: Row, tree: DraftTree, logits: torch.Tensor, limits: TypicalLimits | None
) -> Verdict:
    def target_probs(node: int) -> torch.Tensor:
        return probs(logits[node : node + 1], [row.sampler], [tree.path_tokens(node)])[0]

    if rule == TYPICAL.name:
        return typical(tree, target_probs, limits)
    noise = RejectionNoise(row.seed, row.num_steps, len(row.token_ids))
    return BY_DRAFT[rule](tree, target_probs, noise)


def choose_all(rows: Sequence[Row], trees: Sequence[DraftTree], logits: Logits) -> Choices:
    """The token that decoding would emit after every node, accepted or not: one call for all nodes of all rows."""
    listed = as_list(logits)
    choices = _argmaxes(rows, trees, listed)
    sampled = [i for i in range(len(rows)) if i not in choices]
    paths = [trees[i].path_tokens(node) for i in sampled for node in range(len(trees[i]))]
    nodes = [(i, node) for i in sampled for node in range(len(trees[i]))]
    chosen = iter(_choose(rows, listed, nodes, paths) if nodes else ())
    choices |= {i: tuple(next(chosen) for _ in trees[i].tokens) for i in sampled}
    return [choices[i] for i in range(len(rows))]


def match_rows(
    rows: Sequence[Row], trees: Sequence[DraftTree], logits: Logits, choices: Choices | None = None
) -> list[Verdict]:
    """Walk every tree with the target's own tokens: one choice per visited node, all rows at once.

    Rows that take the argmax have that of all their nodes in one operation. On an accelerator all nodes of all rows are
    chosen at once, since every round trip costs more than the choices.

    Args:
      choices: from `choose_all`, where it was called already.

    Returns: one verdict per row; its ``next_token`` is -1 for a row without a usable distribution.
    """
    listed = as_list(logits)
    if choices is None:
        if listed.device.type != "cpu":
            choices = choose_all(rows, trees, listed)
        elif len(rows) == 1:
            return [_match_one(rows[0], trees[0], listed[0])]
    known = _argmaxes(rows, trees, listed) if choices is None else dict(enumerate(choices))
    verdicts = {i: match(trees[i], tokens.__getitem__) for i, tokens in known.items()}
    walks = {i: walk(tree) for i, tree in enumerate(trees) if i not in verdicts}
    nodes = {i: next(steps) for i, steps in walks.items()}
    paths: dict[int, tuple[int, ...]] = dict.fromkeys(walks, ())
    while nodes:
        tokens = _choose(rows, listed, list(nodes.items()), [paths[i] for i in nodes])
        for i, token in zip(list(nodes), tokens, strict=True):
            try:
                nodes[i] = walks[i].send(token)
                paths[i] += (token,)
            except StopIteration as end:
                verdicts[i] = end.value
                del nodes[i]
    return [verdicts[i] for i in range(len(rows))]


def _match_one(row: Row, tree: DraftTree, logits: torch.Tensor) -> Verdict:
    """`match_rows` of one row on the CPU, whose nodes have the logits (N, V): of those that are visited alone."""
    sampler, length = row.sampler, len(row.token_ids)
    path: list[int] = []

    def chosen(node: int) -> int:
        path.append(choose_at(logits, node, sampler, path, length + len(path)))
        return path[-1]

    return match(tree, chosen)


def as_list(logits: Logits) -> NodeLogits:
    """Logits of rows one after another; a table (B, N, V) without a copy, its padding included."""
    if isinstance(logits, NodeLogits):
        return logits
    return NodeLogits(logits.flatten(0, 1), [logits.shape[1]] * logits.shape[0])


def _argmaxes(rows: Sequence[Row], trees: Sequence[DraftTree], logits: NodeLogits) -> dict[int, tuple[int, ...]]:
    """The tokens after all nodes of the rows whose choice is the argmax, by row."""
    plain = [i for i, row in enumerate(rows) if row.sampler.is_argmax]
    if not plain:
        return {}
    starts = logits.starts
    if len(plain) == len(rows) or logits.device.type != "cpu":
        tokens: list[int] = argmax(logits.values[: starts[len(rows)]]).tolist()
        return {i: tuple(tokens[starts[i] : starts[i] + len(trees[i])]) for i in plain}
    return {i: tuple(argmax(logits[i]).tolist()[: len(trees[i])]) for i in plain}  # without a copy


def _choose(
    rows: Sequence[Row], logits: NodeLogits, nodes: Sequence[tuple[int, int]], paths: Sequence[tuple[int, ...]]
) -> list[int]:
    """The target's tokens at (row, node) pairs, the draft tokens that lead to each given."""
    places = [logits.starts[i] + node for i, node in nodes]
    if places == list(range(len(places))):  # without a copy
        picked = logits.values[: len(places)]
    elif logits.device.type == "cpu":
        picked = torch.stack([logits.values[place] for place in places])  # faster than an index
    else:
        picked = logits.values[upload([torch.tensor(places, device="cpu")], logits.device)[0]]
    positions = [len(rows[i].token_ids) + len(path) for (i, _), path in zip(nodes, paths, strict=True)]
    chosen: list[int] = choose(picked, [rows[i].sampler for i, _ in nodes], paths, positions).tolist()
    return chosen
