"""Faults of drafters that share the target's cache: they reach tokens or logits, on architectures of every build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_identity import MODES, PROMPTS
from test_mutations import MUTATIONS, Mutation, layer_kinds
from test_self_draft_state import SELF_DRAFTED

from architectures import VOCAB_SIZE
from drafting import layer_skip, quantized_self, swift
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError
from foredraft.model import reduced
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.testing import Trace, compare, decode
from harness import adapter
from mutants import Apply, Call, replaced, skipped, with_arguments, wrapped
from toys import deep as target

VISIBLE = 1e-3
NUM_TOKENS = 16
PARAMS = replace(MODES["greedy"], max_tokens=NUM_TOKENS)
REQUESTS = [(prompt, PARAMS) for prompt in (PROMPTS[0], PROMPTS[3])]

DRAFTERS: dict[str, Callable[[], SelfDrafter]] = {
    "layer-skip-tree": lambda: layer_skip(3, VOCAB_SIZE, layer_set=LayerSet((1,), ()), num_branches=3),
    "quantized-chain": lambda: quantized_self(3, VOCAB_SIZE),
}


def outcome(
    lm: CausalLM, drafter: SelfDrafter | EmptyDrafter, fault: Callable[[], None] = lambda: None
) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and raw logits (T, V) of every row; the fault begins when the prompts are in the cache."""
    engine = Engine(lm, drafter, EngineConfig(output_logits=True))
    rows = [engine.add_request(prompt, params)[0] for prompt, params in REQUESTS]
    logits: dict[int, list[torch.Tensor]] = {row.id: [] for row in rows}
    is_sound = True
    while engine.has_unfinished:
        if is_sound and len(engine.decoding_rows) == len(rows):
            fault()
            is_sound = False
        for output in engine.step():
            if output.logits is not None:
                logits[output.row.id].append(output.logits)
    return [(row.output_ids, torch.cat(logits[row.id])) for row in rows]


@cache
def faultless(name: str) -> list[tuple[list[int], torch.Tensor]]:
    return outcome(adapter(name), EmptyDrafter())


def shows(got: list[tuple[list[int], torch.Tensor]], want: list[tuple[list[int], torch.Tensor]]) -> bool:
    """Whether a token differs, or a logit before the first one that does."""
    for (tokens, logits), (true_tokens, true_logits) in zip(got, want, strict=True):
        if tokens != true_tokens or not float((logits - true_logits).abs().max()) <= VISIBLE:
            return True
    return False


def first_of_all(*cell: Any, always: bool) -> Any:
    """A cell of a table, of which architectures other than the first run in the whole matrix alone."""
    return pytest.param(*cell, marks=() if always else pytest.mark.full)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", [first_of_all(name, always=name == "llama") for name in SELF_DRAFTED])
def test_without_a_fault_nothing_shows(name: str, drafter: str) -> None:
    assert not shows(outcome(adapter(name), DRAFTERS[drafter]()), faultless(name))


CELLS = [
    pytest.param(
        mutation,
        name,
        drafter,
        marks=() if (name, is_tree) == ("llama", bool(number % 2)) else pytest.mark.full,
        id=f"{mutation.name}-{name}-{drafter}",
    )
    for number, mutation in enumerate(MUTATIONS)
    for name in SELF_DRAFTED
    for drafter, is_tree in (("layer-skip-tree", True), ("quantized-chain", False))
    if (mutation.in_trees if is_tree else mutation.in_chains)
    and (not mutation.needs_layer or mutation.needs_layer in layer_kinds(name))
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("mutation", "name", "drafter"), CELLS)
def test_a_fault_in_state_positions_or_masks_shows_when_the_target_drafts_for_itself(
    mutation: Mutation, name: str, drafter: str
) -> None:
    """In tokens or logits, or as a refusal by the cache."""
    lm, want = adapter(name), faultless(name)
    with pytest.MonkeyPatch.context() as patch:
        try:
            got = outcome(lm, DRAFTERS[drafter](), lambda: mutation.apply(patch))
        except (ForedraftError, RuntimeError, IndexError):
            return
    assert shows(got, want)


# -- what drafting itself may do to the cache ----------------------------------------------------------------------


def rolls_back_elsewhere(extra: int) -> Apply:
    def change(call: Call) -> dict[str, Any]:
        return {"lengths": [length + extra for length in call.lengths]}

    return with_arguments(KVCache, "rollback", change)


TOUCHING = {
    "leaves-its-columns": skipped(KVCache, "rollback"),
    "commits-its-first-column": rolls_back_elsewhere(1),
    "drops-a-column-of-the-target": rolls_back_elsewhere(-1),
    "edits-the-target-itself": replaced(reduced, "shadow", lambda model: model),
}


@pytest.mark.parametrize(
    ("name", "drafter", "fault"),
    [
        first_of_all(name, drafter, fault, always=name == "llama" and (j + k) % 2 == 0)
        for name in SELF_DRAFTED
        for j, drafter in enumerate(DRAFTERS)
        for k, fault in enumerate(TOUCHING)
    ],
)
def test_a_drafter_that_touches_the_target_shows(name: str, drafter: str, fault: str) -> None:
    lm, want = adapter.__wrapped__(name, probe=False), faultless(name)
    with pytest.MonkeyPatch.context() as patch:
        TOUCHING[fault](patch)
        try:
            got = outcome(lm, DRAFTERS[drafter]())
        except (ForedraftError, RuntimeError, IndexError):
            return
    assert shows(got, want)


SWIFT_REQUESTS = [
    ([3, 1, 4, 1 + i], SamplingParams(max_tokens=24, temperature=0.9 * (i % 2), seed=3)) for i in range(3)
]


@cache
def swift_plain() -> Trace:
    return decode(target(4), EmptyDrafter(), SWIFT_REQUESTS)


def stays_short(kept: Any) -> Any:
    @contextmanager
    def wrong(cache: KVCache, row: int, first_column: int, last_column: int) -> Iterator[None]:
        with kept(cache, row, first_column, last_column):
            yield
        cache.lengths[row] = first_column

    return wrong


SEARCHING = {
    "keeps-too-little": with_arguments(KVCache, "kept", lambda call: {"last_column": call.first_column + 1}),
    "puts-nothing-back": with_arguments(KVCache, "kept", lambda call: {"last_column": call.first_column}),
    "leaves-the-row-short": wrapped(KVCache, "kept", stays_short),
}


@pytest.mark.parametrize("fault", SEARCHING)
def test_a_search_that_touches_the_target_shows(fault: str) -> None:
    """Scoring writes over columns of the target, so a slip there is a wrong token or a broken invariant."""
    want = swift_plain()
    with pytest.MonkeyPatch.context() as patch:
        SEARCHING[fault](patch)
        with pytest.raises((AssertionError, ForedraftError)):
            compare(decode(target(4), swift(num_scored=4), SWIFT_REQUESTS), want, fault)


def test_the_search_without_a_fault_changes_no_token() -> None:
    compare(decode(target(4), swift(num_scored=4), SWIFT_REQUESTS), swift_plain(), "swift")
