"""Faults particular to one method: each makes a named test of the suite fail, and none of them changes a token.

The second half is what verification promises: a drafter may be as wrong as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_drafter_state import DRAFTERS, OTHERS, VOCAB_SIZE, target
from test_swift import swift
from test_swift import target as deep_target

from foretoken.config.engine import EngineConfig
from foretoken.drafters.lengths import Fixed
from foretoken.drafters.lookup.suffix import SuffixDrafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.drafters.selfdraft.layer_skip import LayerSkipDrafter
from foretoken.drafters.selfdraft.quantized_self import QuantizedSelfDrafter
from foretoken.engine.drafter import Drafter
from foretoken.model.lm import CausalLM
from foretoken.retrieval.history import OutputHistory
from foretoken.testing import GREEDY, PROMPTS, SAMPLED, Trace, compare, decode
from method_mutants import MUTANTS
from mutants import Mutant

METHODS: dict[str, Callable[[], Drafter]] = {
    **DRAFTERS,
    **OTHERS,
    "suffix-shared": lambda: SuffixDrafter(4, min_token_prob=0.0, history=OutputHistory(6, max_outputs=2)),
    "layer-skip-tree": lambda: LayerSkipDrafter(
        LayerSet((1,), ()), target_vocab_size=VOCAB_SIZE, policy=Fixed(3), num_branches=2
    ),
    "quantized": lambda: QuantizedSelfDrafter(
        target_vocab_size=VOCAB_SIZE, policy=Fixed(3), layer_set=LayerSet((1,), ())
    ),
    "swift": lambda: swift(num_scored=2),
}
REQUESTS = [(prompt, replace(params, max_tokens=9)) for prompt in PROMPTS[:3] for params in (GREEDY, SAMPLED)]
TWO_AT_A_TIME = EngineConfig(max_num_seqs=4)


@cache
def deep() -> CausalLM:
    return deep_target(4)


def target_of(method: str) -> CausalLM:
    return deep() if method == "swift" else target()


@cache
def plain(lm: CausalLM) -> Trace:
    return decode(lm, EmptyDrafter(), REQUESTS)


def cells(one_in: int, only: Callable[[Mutant], bool] = lambda _: True) -> list[Any]:
    """All mutants; the fast part takes the first of so many of every method."""
    return [
        pytest.param(mutant, marks=() if number % one_in == 0 else pytest.mark.slow, id=f"{method}: {mutant.name}")
        for method, mutants in MUTANTS.items()
        for number, mutant in enumerate(mutants)
        if only(mutant)
    ]


@pytest.mark.parametrize("mutant", cells(3))
def test_a_fault_of_a_method_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    """By an assertion of the test that the table names, and of no other kind of error."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        try:
            mutant.test(patch, tmp_path)
        except mutant.raises:
            return
    pytest.fail(f"{mutant.caught_by.__name__} does not notice that {mutant.name}")


@pytest.mark.parametrize("mutant", cells(9, lambda mutant: bool(mutant.keeps_tokens)))
def test_a_fault_of_a_method_changes_no_token(mutant: Mutant) -> None:
    """Rows come and go, greedy and sampled ones in one batch."""
    lm, drafter = target_of(mutant.keeps_tokens), METHODS[mutant.keeps_tokens]()
    want = plain(lm)
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        compare(decode(lm, drafter, REQUESTS, config=TWO_AT_A_TIME), want, mutant.name)
