"""The acceptance rules over the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from foretoken.accept.rules import RejectionNoise, Verdict, block, rejection, walk
from foretoken.config.acceptance import RULES
from foretoken.engine.sequence import Sequence
from foretoken.law.sampling import argmax, choose, probs
from foretoken.tree import DraftTree

Choices = list[tuple[int, ...]]
"""The target's own token at every node of every row; -1 where there is no usable distribution."""


def accept_rows(
    rule: str, rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor, choices: Choices | None = None
) -> list[Verdict]:
    """Walk every tree by the acceptance rule; greedy rows by the argmax under every rule.

    Args:
      rule: a name of `foretoken.config.acceptance.RULES`.
      logits: (B or more, N, V).
      choices: from `choose_all`, where it was called already.

    Returns: one verdict per row; its ``next_token`` is -1 for a row without a usable distribution.
    """
    if RULES[rule].keeps_tokens:
        return match_rows(rows, trees, logits, choices)
    greedy = [i for i, row in enumerate(rows) if row.law.is_greedy]
    argmax_walks = match_rows([rows[i] for i in greedy], [trees[i] for i in greedy], logits[greedy])
    verdicts = dict(zip(greedy, argmax_walks, strict=True))
    for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        if i not in verdicts:
            verdicts[i] = _accept_sampled(rule, row, tree, logits[i])
    return [verdicts[i] for i in range(len(rows))]


def _accept_sampled(rule: str, row: Sequence, tree: DraftTree, logits: torch.Tensor) -> Verdict:
    noise = RejectionNoise(row.seed, row.num_steps, len(row.token_ids))

    def target_probs(node: int) -> torch.Tensor:
        return probs(logits[node : node + 1], [row.law], [tree.path_tokens(node)])[0]

    return (rejection if RULES[rule].takes_trees else block)(tree, target_probs, noise)


def choose_all(rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor) -> Choices:
    """The token that decoding would emit after every node, accepted or not: one call for all nodes of all rows.

    Args:
      logits: (B or more, N, V), N at least the size of the largest tree.
    """
    logits = logits[: len(trees)]  # strict mode pads the batch
    if all(row.law.is_argmax for row in rows):
        best = argmax(logits.flatten(0, 1)).view(logits.shape[:2]).tolist()
        return [tuple(tokens[: len(tree)]) for tokens, tree in zip(best, trees, strict=True)]
    nodes = [(i, node) for i, tree in enumerate(trees) for node in range(len(tree))]
    chosen = iter(_choose(rows, trees, logits, nodes))
    return [tuple(next(chosen) for _ in tree.tokens) for tree in trees]


def match_rows(
    rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor, choices: Choices | None = None
) -> list[Verdict]:
    """Walk every tree with the target's own tokens: one choice per visited node, all rows at once.

    On an accelerator all nodes are chosen at once instead, since every round trip costs more than the choices.

    Args:
      choices: from `choose_all`, where it was called already.

    Returns: one verdict per row; its ``next_token`` is -1 for a row without a usable distribution.
    """
    if choices is None and (logits.device.type != "cpu" or all(row.law.is_argmax for row in rows)):
        choices = choose_all(rows, trees, logits)
    walks = [walk(tree) for tree in trees]
    nodes = [next(steps) for steps in walks]
    verdicts: list[Verdict | None] = [None] * len(rows)
    going_on = list(range(len(rows)))
    while going_on:
        if choices is not None:
            tokens = [choices[i][nodes[i]] for i in going_on]
        else:
            tokens = _choose(rows, trees, logits, [(i, nodes[i]) for i in going_on])
        for i, token in zip(going_on, tokens, strict=True):
            try:
                nodes[i] = walks[i].send(token)
            except StopIteration as end:
                verdicts[i] = end.value
        going_on = [i for i in going_on if verdicts[i] is None]
    return [verdict for verdict in verdicts if verdict is not None]


def _choose(rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor, nodes: Seq[tuple[int, int]]) -> list[int]:
    """The target's tokens at (row, node) pairs."""
    picked = logits[[i for i, _ in nodes], [node for _, node in nodes]]
    paths = [trees[i].path_tokens(node) for i, node in nodes]
    positions = [len(rows[i].token_ids) + len(path) for (i, _), path in zip(nodes, paths, strict=True)]
    chosen: list[int] = choose(picked, [rows[i].law for i, _ in nodes], paths, positions).tolist()
    return chosen
