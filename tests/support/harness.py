"""Runs trees through adapter and cache without the engine, for comparison with the cache-free oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from architectures import ARCHITECTURES, VOCAB_SIZE, draft_model, target_model
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.native.library import library
from foredraft.testing import Trace, reference_node_logits
from foredraft.tree import DraftTree

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5
"""Of models that compute something in float32 whatever their dtype: most eager attentions take their softmax so."""


def tolerance(name: str, attention: str = "") -> float:
    """How exact a float64 model is in any arrangement of the same computation."""
    inexact = (attention or first_attention(name)) == "eager" or ARCHITECTURES[name].rounds_in_float32
    return FLOAT32_TOLERANCE if inexact else FLOAT64_TOLERANCE


def first_attention(name: str) -> str:
    return ARCHITECTURES[name].attention[0]


@cache
def adapter(name: str, attention: str = "", execution: str = "", *, probe: bool = True) -> CausalLM:
    """The float64 adapter of a tiny model; shared, so not to be changed.

    By default packed, where that can be: in float64 no linear layer is, but attention and lists of nodes are ours.
    """
    execution = execution or ("packed" if library() is not None else "eager")
    return CausalLM(target_model(name, attention or first_attention(name)), execution=execution, probe=probe)


@cache
def draft_adapter(name: str) -> CausalLM:
    return CausalLM(draft_model(name, first_attention(name)), execution="eager")


def buffers_of(cache: KVCache) -> list[torch.Tensor]:
    """Keys and values (rows, heads, columns, head_dim) of every layer that has run."""
    return [buffer for layer in cache.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]


def drafted(trace: Trace) -> Trace:
    """A trace in which drafts were accepted: without any, it would equal plain decoding whatever else is broken."""
    assert trace.num_accepted > 0, "no draft token was accepted"
    return trace


def random_ids(count: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


@dataclass(frozen=True)
class Round:
    """Trees to verify, one per row, and the paths to commit afterwards."""

    trees: tuple[DraftTree, ...]
    paths: tuple[tuple[int, ...], ...]


def tree_of(parents: tuple[int, ...], seed: int) -> DraftTree:
    """A tree of the given shape with different random tokens."""
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return DraftTree(tuple(ids[: len(parents)].tolist()), parents)


BUSHY = (-1, 0, 0, 1, 1, 2, 4)
SPLIT = (-1, 0, 0, 0, 2, 4, 2, 5)
TREE_ROUNDS = (
    Round((tree_of(BUSHY, 1), tree_of(SPLIT, 2)), ((0, 1, 4, 6), (0, 2))),
    Round((tree_of(SPLIT, 3), tree_of(BUSHY, 4)), ((0,), (0, 2, 5))),
    Round((tree_of(BUSHY, 5), tree_of(BUSHY, 6)), ((0, 2), (0, 1))),
    Round((tree_of(SPLIT, 7), tree_of(SPLIT, 8)), ((0,), (0,))),
)
CHAIN = (-1, 0, 1, 2, 3)
SHORT_CHAIN = (-1, 0, 1, 2)
CHAIN_ROUNDS = (
    Round((tree_of(CHAIN, 11), tree_of(SHORT_CHAIN, 12)), ((0, 1), (0, 1, 2, 3))),
    Round((tree_of(SHORT_CHAIN, 13), tree_of(CHAIN, 14)), ((0,), (0, 1, 2))),
    Round((tree_of(CHAIN, 15), tree_of(CHAIN, 16)), ((0, 1, 2, 3, 4), (0,))),
    Round((tree_of(CHAIN, 17), tree_of(CHAIN, 18)), ((0,), (0,))),
)
PREFIXES = (tuple(random_ids(13, 21)), tuple(random_ids(9, 22)))


@dataclass
class Session:
    """Rows in an adapter's cache, with the texts that the cache ought to hold."""

    lm: CausalLM
    cache: KVCache
    texts: list[list[int]]

    @classmethod
    def start(cls, lm: CausalLM, prefixes: Sequence[Sequence[int]], chunk: int = 5) -> Session:
        """Prefill ragged rows in chunks, the committed part only."""
        cache = lm.new_cache(len(prefixes), capacity=8)
        session = cls(lm, cache, [[] for _ in prefixes])
        for start in range(0, max(map(len, prefixes)), chunk):
            session.feed([prefix[start : start + chunk] for prefix in prefixes])
        return session

    def feed(self, chains: Sequence[Sequence[int]]) -> None:
        self.lm.forward(Nodes.from_chains(chains), self.cache, keep=slice(0, 0))
        self.cache.commit([range(len(chain)) for chain in chains])
        for text, chain in zip(self.texts, chains, strict=True):
            text.extend(chain)

    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Logits (N, V) of every row's nodes."""
        logits = self.lm.forward(Nodes.from_trees(trees), self.cache)
        return [logits[row, : len(tree)] for row, tree in enumerate(trees)]

    def commit(self, trees: Sequence[DraftTree], paths: Sequence[Sequence[int]]) -> None:
        self.cache.commit(paths)
        for text, tree, path in zip(self.texts, trees, paths, strict=True):
            text.extend(tree.tokens[node] for node in path)

    def run(self, rounds: Sequence[Round]) -> list[list[torch.Tensor]]:
        """Verify and commit round by round; the logits of every round and row."""
        logits = []
        for step in rounds:
            logits.append(self.verify(step.trees))
            self.commit(step.trees, step.paths)
        return logits


@cache
def oracle(name: str, attention: str, is_tree: bool) -> list[list[torch.Tensor]]:
    """What `Session.run` has to give, by plain forwards over every path."""
    texts = [list(prefix) for prefix in PREFIXES]
    logits = []
    for step in rounds_of(is_tree):
        model = target_model(name, attention)
        logits.append([reference_node_logits(model, text, tree) for text, tree in zip(texts, step.trees, strict=True)])
        for text, tree, path in zip(texts, step.trees, step.paths, strict=True):
            text.extend(tree.tokens[node] for node in path)
    return logits


def rounds_of(is_tree: bool) -> tuple[Round, ...]:
    return TREE_ROUNDS if is_tree else CHAIN_ROUNDS


def largest_difference(got: Sequence[Sequence[torch.Tensor]], want: Sequence[Sequence[torch.Tensor]]) -> float:
    """Over all rounds, rows and nodes; infinite where NaN."""
    worst = 0.0
    for got_rows, want_rows in zip(got, want, strict=True):
        for a, b in zip(got_rows, want_rows, strict=True):
            difference = float((a - b).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
