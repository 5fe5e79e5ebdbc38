"""zoo:tiny as an `LLM`, loaded once per process for all tests that need texts of a model and a tokenizer."""

from __future__ import annotations

from functools import cache

from foredraft import LLM


@cache
def tiny() -> LLM:
    """Plain decoding in float32, four rows at a time; shared, so not to be left with rows that run."""
    return LLM("zoo:tiny", dtype="float32", max_num_seqs=4)
