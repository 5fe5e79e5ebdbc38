"""Five short rows, three at a time, in an engine that contains faults: what tests of faults run and compare."""

from __future__ import annotations

from functools import cache
from typing import Any

from foredraft import SamplingParams
from foredraft.config.engine import EngineConfig
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.methods.lengths import LengthPolicy
from foredraft.testing import check_cache_lengths
from toys import VOCAB_SIZE, small, target

TEXTS = [[5, 6, 7, 5, 6, 7, 5], [9, 3, 9, 3, 9, 3, 9, 4, 4, 4, 4], [11], [2, 4, 2, 4, 2], [5, 6, 7]]
CONTAINED = EngineConfig(max_num_seqs=3, contains_faults=True)


def layer_skip() -> SelfDrafter:
    return SelfDrafter("layer_skip", layer_set=LayerSet((1,), ()), target_vocab_size=VOCAB_SIZE, policy=LengthPolicy(3))


def draft_model() -> DraftModelDrafter:
    return DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE)


def params(number: int, **others: Any) -> SamplingParams:
    """Every second row is greedy."""
    temperature = 0.0 if number % 2 else 0.9
    return SamplingParams(temperature=temperature, max_tokens=14, seed=number, ignore_eos=True, **others)


def run(drafter: Drafter, config: EngineConfig = CONTAINED, given: Any = params, **others: Any) -> list[Row]:
    """All rows, three at a time; ``others`` are arguments of the engine."""
    engine = Engine(target(), drafter, config, **others)
    rows = [engine.add_request(text, given(number))[0] for number, text in enumerate(TEXTS)]
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
    return rows


@cache
def plain() -> list[list[int]]:
    return [row.output_ids for row in run(EmptyDrafter())]
