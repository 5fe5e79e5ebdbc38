"""The match rule over the rows of a batch: one choice of the target per visited node, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from foretoken.engine.sampling import argmax, choose
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree
from foretoken.engine.verify import Verdict, walk


def match_rows(rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor) -> list[Verdict]:
    """Walk every tree with the target's own tokens: one choice per visited node, all rows at once.

    A verdict whose ``next_token`` is -1 marks a row without a usable distribution.
    """
    walks = [walk(tree) for tree in trees]
    nodes = [next(steps) for steps in walks]
    verdicts: list[Verdict | None] = [None] * len(rows)
    best = (
        argmax(logits.flatten(0, 1)).view(logits.shape[:2]).tolist() if any(row.law.is_argmax for row in rows) else []
    )
    going_on = list(range(len(rows)))
    while going_on:
        tokens = {i: best[i][nodes[i]] for i in going_on if rows[i].law.is_argmax}
        drawn = [i for i in going_on if i not in tokens]
        if drawn:
            tokens.update(zip(drawn, _choose(rows, trees, logits, nodes, drawn), strict=True))
        for i in going_on:
            try:
                nodes[i] = walks[i].send(tokens[i])
            except StopIteration as end:
                verdicts[i] = end.value
        going_on = [i for i in going_on if verdicts[i] is None]
    return [verdict for verdict in verdicts if verdict is not None]


def _choose(
    rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor, nodes: Seq[int], drawn: Seq[int]
) -> list[int]:
    picked = logits[list(drawn), [nodes[i] for i in drawn]]
    paths = [trees[i].path_tokens(nodes[i]) for i in drawn]
    positions = [len(rows[i].token_ids) + len(path) for i, path in zip(drawn, paths, strict=True)]
    chosen: list[int] = choose(picked, [rows[i].law for i in drawn], paths, positions).tolist()
    return chosen
