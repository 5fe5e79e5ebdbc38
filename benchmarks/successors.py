"""Drafters that know what follows single tokens, and nothing of the text: baselines of measurements."""

from __future__ import annotations

from collections import Counter, defaultdict
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

import torch

from foretoken import LLM
from foretoken.engine.drafter import Budget, ContextDrafter
from foretoken.engine.sequence import Sequence
from foretoken.model.lm import CausalLM, Nodes
from foretoken.train.examples import read_prompts
from foretoken.tree import DraftTree

CHAIN_LENGTH = 5


class Argmax:
    """The target's argmax behind every token alone, asked for once per token that occurs."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self._known: dict[int, list[tuple[int, float]]] = {}

    @torch.inference_mode()
    def after(self, token: int) -> list[tuple[int, float]]:
        if token not in self._known:
            logits = self._target.forward(Nodes.from_chains([[token]]), self._target.new_cache(1, capacity=1))
            self._known[token] = [(int(logits[0, 0].argmax()), 1.0)]
        return self._known[token]


class Bigrams:
    """What has followed a token in answers, likeliest first, with its share."""

    def __init__(self, llm: LLM, answers: Path) -> None:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for asked in read_prompts(answers):
            ids = [*llm.tokenizer(asked.answer or "", add_special_tokens=False)["input_ids"]]
            ids += [llm.tokenizer.eos_token_id] if asked.ended else []
            for first, second in pairwise(ids):
                counts[first][second] += 1
        self._ranked = {
            token: [(successor, count / found.total()) for successor, count in found.most_common(10)]
            for token, found in counts.items()
        }

    def after(self, token: int) -> list[tuple[int, float]]:
        return self._ranked.get(token, [])


class SuccessorDrafter(ContextDrafter):
    """The likeliest nodes of the tree that successors of single tokens span."""

    def __init__(self, name: str, successors: Argmax | Bigrams, num_nodes: int | None) -> None:
        self.name = name
        self._successors, self._num_nodes = successors, num_nodes

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        tokens, parents, depths = [row.pending], [-1], [0]
        is_chain = self._num_nodes is None
        size, depth = (CHAIN_LENGTH + 1 if self._num_nodes is None else self._num_nodes), int(budget)
        heap: list[tuple[float, int, int, int]] = []  # minus the chance of the path, order, parent, token

        def open_(node: int, chance: float) -> None:
            for token, share in self._successors.after(tokens[node])[: 1 if is_chain else None]:
                heappush(heap, (-chance * share, len(heap) + len(tokens), node, token))

        open_(0, 1.0)
        while heap and len(tokens) < min(size, budget.max_nodes()):
            negative, _, parent, token = heappop(heap)
            if depths[parent] + 1 > depth:
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            open_(len(tokens) - 1, -negative)
        return DraftTree(tuple(tokens), tuple(parents), source=self.name)
