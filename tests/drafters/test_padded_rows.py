"""Drafts for some rows of a batch, which lie apart: what lies between is padding, and every draft is of its own row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import test_drafters

import toys
from foredraft import LLM
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.testing import GREEDY, PROMPTS, SAMPLED
from harness import random_ids

DEPTH = 3
TEXTS = sorted(PROMPTS, key=len)
"""The shortest first, as they come into the cache: row i has slot i."""
UNDRAFTED = [((0, 2), SAMPLED), ((0, 2, 3), GREEDY), ((0, 1, 2), SAMPLED)]
"""Of five rows: a slot between the others, two of them, and none."""


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    name: partial(test_drafters.DRAFTERS[name], DEPTH)
    for name in (
        *("draft-model", "draft-model-tree", "sparse-model", "sparse-model-voting-tree", "medusa", "hydra", "hydra++"),
        *("layer-skip", "layer-skip-tree", "sparse-kv", "sparse-kv-voting-tree"),
    )
}
for _name, _growth in (("eagle3", {}), ("eagle3-chain", {"num_branches": 1, "reranks": False, "max_nodes": None})):
    # of a sharpness that is given: what it learns of one row, others would be drafted for with
    DRAFTERS[_name] = partial(test_drafters.eagle_drafter(3, sharpness=1.0, **_growth), DEPTH)


def run(drafter: Drafter, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Row]:
    """Run requests together; those that come together lie in the cache in their order."""
    engine = Engine(toys.target(), drafter)
    rows = [engine.add_request(prompt, params)[0] for prompt, params in requests]
    while not all(row.output_ids for row in rows):
        engine.step()
    assert [row.slot for row in rows] == list(range(len(rows)))
    list(engine.run())
    return rows


def counts(row: Row) -> tuple[int, int, int]:
    return row.stats.num_steps, row.stats.num_draft_tokens, row.stats.num_accepted_draft_tokens


def wanted(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=24, ignore_eos=True)


@cache
def alone(method: str, place: int, params: SamplingParams) -> Row:
    """A row by itself, with a drafter of its own."""
    return run(DRAFTERS[method](), [(TEXTS[place], wanted(params))])[0]


@cache
def plain(params: SamplingParams) -> list[list[int]]:
    rows = run(EmptyDrafter(), [(text, wanted(params)) for text in TEXTS])
    return [row.output_ids for row in rows]


def check(method: str, undrafted: Sequence[int], params: SamplingParams) -> None:
    """Texts are those of plain decoding, and what is drafted and accepted of a row what is when it is alone."""
    requests = [
        (text, replace(wanted(params), num_speculative_tokens=0 if place in undrafted else None))
        for place, text in enumerate(TEXTS)
    ]
    rows = run(DRAFTERS[method](), requests)
    assert [row.output_ids for row in rows] == plain(params)
    drafted = [place for place in range(len(rows)) if place not in undrafted]
    assert [counts(rows[place]) for place in drafted] == [counts(alone(method, place, params)) for place in drafted]
    assert sum(rows[place].stats.num_accepted_draft_tokens for place in drafted) > 0
    assert [rows[place].stats.num_draft_tokens for place in undrafted] == [0] * len(undrafted)


ALIKE = {"draft-model-tree", "sparse-model", "eagle3-chain", "medusa", "hydra", "layer-skip", "sparse-kv"}
"""Drafters whose rows are fed as those of others in the table."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else ()) for name in DRAFTERS]
)
def test_rows_that_lie_apart_are_drafted_for_as_alone(method: str) -> None:
    for undrafted, params in UNDRAFTED:
        check(method, undrafted, params)


# -- over the library's own kernels ------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 4},
    "eagle3, level by level": {"num_speculative_tokens": 4, "draft_rerank": False},
    "medusa": {},
    "hydra++": {},
    "layer_skip": {"num_speculative_tokens": 4},
    "sparse_kv": {"num_speculative_tokens": 4, "kv_budget": 16},
}
ORDINARY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@cache
def tiny() -> LLM:
    return LLM("zoo:tiny", None, dtype="float32")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("eagle3", "layer_skip") else pytest.mark.full) for name in CONFIGS]
)
def test_rows_that_lie_apart_are_drafted_for_over_kernels(name: str) -> None:
    """Five prompts of a model that was trained, two of which want no drafts."""
    llm = tiny()
    given: Any = [{"prompt_token_ids": random_ids(6 + 5 * place, place, 500)} for place in range(5)]
    expected = [output.outputs[0].token_ids for output in llm.generate(given, ORDINARY)]
    drafting = llm.with_speculative_config(
        {"method": name.partition(",")[0], "length_policy": "fixed", **CONFIGS[name]}
    )
    for undrafted in ((0, 2), (0, 1, 2)):
        params = [replace(ORDINARY, num_speculative_tokens=0 if i in undrafted else None) for i in range(5)]
        outputs = drafting.generate(given, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        for place, output in enumerate(outputs):
            found = output.metrics.speculative_decoding
            if place in undrafted:
                assert found["num_draft_tokens"] == 0
            else:
                (by_itself,) = drafting.generate([given[place]], ORDINARY)
                assert found["num_accepted_draft_tokens"] > 0
                assert (
                    found["num_accepted_draft_tokens"]
                    == by_itself.metrics.speculative_decoding["num_accepted_draft_tokens"]
                )
