"""A real chat model, every method: drafted texts are plain texts, and those of transformers.

zoo:smollm2 on prompts through its chat template, greedy and sampled. Plain decoding runs every request alone, drafting
runs them in batches which rows join and leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch

from foretoken import zoo
from real_model import CHAINS, METHODS, QUESTIONS, TREES, Evidence, Study, chat_requests

pytestmark = pytest.mark.smollm2


@dataclass(frozen=True)
class Size:
    """How much is decoded: so many questions, greedy and sampled, and tokens of each answer."""

    num_questions: int
    max_new_tokens: int
    batch_size: int


SIZES = [
    pytest.param(Size(2, 16, 3), id="covering"),
    pytest.param(Size(len(QUESTIONS), 48, 8), id="whole", marks=pytest.mark.full),
]


FAST = {"ngram", "ngram, tree"}
COVERING = {
    *("draft_model", "jacobi", "layer_skip, swift", "quantized_self", "rest, tree"),
    *("token_recycling", "draft_model, tree", "token_recycling+ngram"),
}
"""What `make test` runs: chains and trees, drafts from models, lookups and the target itself."""


def params(methods: Iterable[str], covering: Iterable[str] = COVERING) -> list[object]:
    """Lookups belong to the fast part, what is covering to the slow one, the rest to the whole matrix."""
    return [
        pytest.param(
            method, marks=() if method in FAST else pytest.mark.slow if method in covering else pytest.mark.full
        )
        for method in methods
    ]


@pytest.fixture(scope="module", params=SIZES)
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Study]:
    """(dtype, exactness) -> the study; every model is loaded once."""
    size: Size = request.param
    made: dict[tuple[str, str], Study] = {}
    models = {}

    def get(dtype: str, exactness: str) -> Study:
        if (dtype, exactness) not in made:
            for wanted in {"float32", dtype} - set(models):
                models[wanted] = zoo.load("smollm2", dtype=getattr(torch, wanted))
            model, _, tokenizer = models[dtype]
            made[dtype, exactness] = Study(
                model,
                tokenizer,
                chat_requests(tokenizer, QUESTIONS[: size.num_questions], size.max_new_tokens),
                exactness=exactness,
                exact=None if dtype == "float32" else get("float32", "default").llm.target,
                batch_size=size.batch_size,
                folder=tmp_path_factory.mktemp("store") / "datastore",
            )
        return made[dtype, exactness]

    return get


GetStudy = Callable[[str, str], Study]


def check_drafts_were_taken(found: Evidence) -> None:
    """Some and not all, but for a drafter whose 4-bit grid is nearly that on which this model was stored."""
    assert found.num_accepted > 0, found
    assert found.num_accepted < found.num_drafted or "quantized_self" in found.method, found


@pytest.mark.parametrize("method", params(METHODS))
def test_single_precision_is_plain_decoding_and_that_of_transformers(
    method: str, study: GetStudy, record_property: Callable[[str, object], None]
) -> None:
    """But for ties closer than 1e-4, noise of the draw and the edge of the nucleus included."""
    found = study("float32", "default").evidence(method, with_generate=True)
    record_property("evidence", str(found))
    for difference in (*found.differences, *found.from_generate):
        assert difference.gap < difference.bound, difference
    check_drafts_were_taken(found)


@pytest.mark.parametrize("method", params(METHODS, {*CHAINS, "token_recycling"} & COVERING))
def test_strict_half_precision_is_plain_decoding(method: str, study: GetStudy) -> None:
    """Every token; trees are reduced to chains."""
    found = study("bfloat16", "strict").evidence(method)
    assert found.differences == ()
    check_drafts_were_taken(found)


@pytest.mark.parametrize("method", params(CHAINS))
def test_chains_in_half_precision_are_plain_decoding(
    method: str, study: GetStudy, record_property: Callable[[str, object], None]
) -> None:
    """Every token by default, where the machine has shapes that keep bits; elsewhere but for near-ties."""
    half = study("bfloat16", "default")
    found = half.evidence(method)
    record_property("evidence", str(found))
    if half.keeps_bits:
        assert found.differences == ()
    check_gaps(found)
    check_drafts_were_taken(found)


@pytest.mark.parametrize("method", params(TREES))
def test_trees_in_half_precision_differ_at_near_ties_only(
    method: str, study: GetStudy, record_property: Callable[[str, object], None]
) -> None:
    """The share of equal texts is recorded; each first difference is one that measured rounding explains."""
    found = study("bfloat16", "default").evidence(method)
    record_property("evidence", str(found))
    check_gaps(found)
    check_drafts_were_taken(found)


def check_gaps(found: Evidence) -> None:
    for difference in found.differences:
        assert difference.gap <= difference.bound, difference


def test_the_bound_of_half_precision_tells_a_fault_from_rounding(study: GetStudy) -> None:
    """The tokens of another answer in place of this one's are no near-tie."""
    half = study("bfloat16", "default")
    texts = [half.plain[(place + 2) % len(half.plain)] for place in range(len(half.plain))]
    found = half.differences(texts, dict(enumerate(half.plain)))
    assert any(difference.gap > difference.bound for difference in found), found
