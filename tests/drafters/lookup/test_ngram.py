"""Prompt lookup against a search by scan, on literal texts and on random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafting import StubRow, begin, made, started
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.engine.drafter import StepResult
from foredraft.errors import ConfigError
from foredraft.methods.lengths import Heuristic
from foredraft.methods.lookup import MATCHES
from foredraft.tree import DraftTree


def proposal(tokens: list[int], budget: int = 9, **options: Any) -> DraftTree:
    drafter = made("ngram", **options)
    return drafter.propose([started(drafter, *tokens)], [budget])[0]


def observed(drafter: NGramDrafter, row: Any, tree: DraftTree, path: tuple[int, ...], emitted: list[int]) -> None:
    row.token_ids.extend(emitted)
    drafter.observe([row], [StepResult(tree, path, tuple(emitted))])


# --- the reference: scan the whole text ------------------------------------------------------------


def scanned(
    tokens: list[int], length: int, shortest: int, longest: int, limit: int, match: str
) -> list[tuple[int, ...]]:
    """Distinct continuations by scan: longest suffix first, then the latest or the earliest occurrence."""
    found: list[tuple[int, ...]] = []
    for order in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - order :]
        ends = range(order, len(tokens))
        for end in ends if match == "earliest" else reversed(ends):
            if order < len(tokens) and tokens[end - order : end] == suffix:
                text = list(tokens)
                for i in range(length):  # one token at a time, from the text as copied so far
                    text.append(text[end + i])
                copy = tuple(text[len(tokens) :])
                if copy not in found and len(found) < limit:
                    found.append(copy)
    return found


texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(texts, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.sampled_from(MATCHES))
def test_draft_equals_the_scan(
    tokens: list[int], length: int, shortest: int, more: int, limit: int, match: str
) -> None:
    tree = proposal(
        tokens,
        num_speculative_tokens=length,
        prompt_lookup_min=shortest,
        prompt_lookup_max=shortest + more,
        num_prompt_lookup_candidates=limit,
        prompt_lookup_match=match,
    )
    want = DraftTree.from_paths(tokens[-1], scanned(tokens, length, shortest, shortest + more, limit, match))
    assert (tree.tokens, tree.parents) == (want.tokens, want.parents)


# --- literal texts ---------------------------------------------------------------------------------


def test_a_tree_keeps_to_its_number_of_nodes() -> None:
    """1 2 was followed by 3 5, before that by 3 4, before that by 6 7."""
    tokens = [1, 2, 6, 7, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    tree = proposal(tokens, num_speculative_tokens=2, num_prompt_lookup_candidates=3, max_draft_nodes=4)
    assert tree.tokens == (2, 3, 5, 4)
    assert tree.source == "ngram"


def test_depth_keeps_to_budget_and_policy() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert proposal(tokens, budget=0).tokens == (2,)
    assert proposal(tokens, budget=2).tokens == (2, 3, 4)
    assert proposal(tokens, num_speculative_tokens=0).tokens == (2,)
    assert proposal(tokens, length_policy=Heuristic(3)).tokens == (2, 3, 4, 5)


def test_heuristic_policy_hears_the_outcome() -> None:
    drafter = NGramDrafter(length_policy=Heuristic(2))
    row = started(drafter, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
    tree = drafter.propose([row], [9])[0]
    assert tree.tokens == (2, 3, 4)
    observed(drafter, row, tree, (0, 1, 2), [3, 4, 5])
    assert drafter.propose([row], [9])[0].tokens == (5, 6, 7, 8, 1)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of latest, earliest"):
        SpeculativeConfig("ngram", prompt_lookup_match="first")
    with pytest.raises(ConfigError, match="is more than prompt_lookup_max"):
        made("ngram", prompt_lookup_min=3, prompt_lookup_max=2)


# --- rows, cost, options ---------------------------------------------------------------------------


def test_a_step_reads_only_the_end_of_the_text() -> None:
    """No rescans: with 20,000 tokens of context a step reads a few dozen of them, also where all tokens are equal."""

    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            item = super().__getitem__(key)
            self.read += len(item) if isinstance(key, slice) else 1
            return item

    drafter = made("ngram", length=5, num_prompt_lookup_candidates=4)
    row: Any = StubRow(1, Counting([7] * 20_000))
    begin(drafter, [row])
    row.token_ids.read = 0
    for _ in range(10):
        tree = drafter.propose([row], [5])[0]
        observed(drafter, row, tree, (0,), [7])
    assert tree.tokens == (7,) * 6
    assert row.token_ids.read < 10 * 1000
