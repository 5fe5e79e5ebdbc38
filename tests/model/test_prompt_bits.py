"""What a prompt leaves in the cache depends on its tokens and `prefill_chunk_size` alone, where the promise is native.

Whatever is read beside it, behind whatever was kept of an earlier request, and once more after a
row had to leave for want of memory. Stock kernels round by the shape of their call meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from guarantee import Said, said

from foredraft import LLM, SamplingParams
from foredraft.native import library as native
from foredraft.testing import hostile_kernels, toy_model
from harness import random_ids

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

VOCAB_SIZE = 64
PROMPTS = [random_ids(length, length, VOCAB_SIZE) for length in (100, 101, 99, 70, 130, 5, 64, 65)]
"""Several of about one length, more and fewer tokens than a draft may have."""

PARAMS = SamplingParams(temperature=0.0, seed=1, max_tokens=12, ignore_eos=True)
DRAFTING = {"method": "token_recycling", "max_draft_nodes": 16}


@pytest.fixture(scope="module", autouse=True)
def _hostile() -> Iterator[None]:
    with hostile_kernels():
        yield


def llm(dtype: torch.dtype, **options: object) -> LLM:
    made = LLM(toy_model(VOCAB_SIZE, dtype=dtype, max_position_embeddings=512), **options)
    assert made.guarantee.kind == "bit-identical"
    return made


@cache
def alone(dtype: torch.dtype, chunk_size: int) -> list[Said]:
    """Plain decoding of every prompt by itself."""
    return said(llm(dtype, prefill_chunk_size=chunk_size), PROMPTS, PARAMS, 1)


def check(rows: list[Said], wanted: list[Said]) -> None:
    for number, (row, want) in enumerate(zip(rows, wanted, strict=True)):
        assert not row.difference(want), f"row {number}: {row.difference(want)}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "chunk_size"), [(torch.float32, 512), (torch.bfloat16, 80), (torch.float16, 33), (torch.bfloat16, 512)]
)
def test_prompts_are_read_together_and_in_pieces(dtype: torch.dtype, chunk_size: int) -> None:
    made = llm(dtype, max_num_seqs=len(PROMPTS), prefill_chunk_size=chunk_size)
    check(said(made, PROMPTS, PARAMS, len(PROMPTS)), alone(dtype, chunk_size))
    rows = said(made.with_speculative_config(DRAFTING), PROMPTS, PARAMS, len(PROMPTS))
    check(rows, alone(dtype, chunk_size))
    assert sum(row.counts["num_accepted_draft_tokens"] for row in rows) > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dtype", "chunk_size"), [(torch.float32, 33), (torch.bfloat16, 64), (torch.float16, 80), (torch.bfloat16, 512)]
)
def test_what_was_kept_of_an_earlier_request_is_what_would_be_read(dtype: torch.dtype, chunk_size: int) -> None:
    """Three turns: each prompt is the text so far, and some more. Chunks of up to 64 are read as steps are, and all of
    them is kept; of longer ones those of the prompt that are whole."""
    options = {"prefill_chunk_size": chunk_size}
    keeping = llm(dtype, num_cached_prefixes=4, **options).with_speculative_config(DRAFTING)
    turns = [[*PROMPTS[0]]]
    for number in range(2):
        (row,) = said(keeping, turns[-1:], PARAMS, 1)
        turns.append([*row.prompt, *row.token_ids, *random_ids(20 + 60 * number, number, VOCAB_SIZE)])
    cached = keeping.generate({"prompt_token_ids": turns[-1]}, PARAMS)[0].num_cached_tokens
    assert cached > len(turns[0]) if chunk_size <= 64 else cached == (len(turns[-2]) - 1) // chunk_size * chunk_size
    check(said(keeping, turns, PARAMS, 1), said(llm(dtype, **options), turns, PARAMS, 1))
    assert all(len(later) > len(earlier) for earlier, later in pairwise(turns))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_had_to_leave_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    """Rows are sent back for want of memory; what they had said is replayed by the kernels that said it."""
    params = replace(PARAMS, max_tokens=140)
    of_row = 2 * 2 * 2 * 8 * dtype.itemsize  # keys and values of two layers and two heads of eight
    made = llm(dtype, max_num_seqs=3, max_kv_bytes=600 * of_row).with_speculative_config(DRAFTING)
    rows = said(made, PROMPTS[:3], params, 3)
    assert made.profile.num_preemptions > 0
    check(rows, said(llm(dtype), PROMPTS[:3], params, 1))
