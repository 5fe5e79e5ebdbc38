"""The ways of drafting: which keys each understands, and its defaults. A new method is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """What one way of drafting understands.

    Args:
      keys: the keys of `SpeculativeConfig` that have a meaning for it.
      num_speculative_tokens: default draft length.
      defaults: defaults of other keys that depend on the method.
    """

    keys: frozenset[str]
    num_speculative_tokens: int
    defaults: Mapping[str, Any] = field(default_factory=dict)


COMMON_KEYS = frozenset({"num_speculative_tokens", "rejection_sample_method", "length_policy", "max_draft_nodes"})

METHODS: dict[str, Method] = {
    "none": Method(keys=frozenset(), num_speculative_tokens=0),
    "draft_model": Method(
        keys=COMMON_KEYS | {"model", "revision", "dtype", "draft_sample_method", "num_draft_branches"},
        num_speculative_tokens=5,
        defaults={"draft_sample_method": "probabilistic", "num_draft_branches": 1},
    ),
    "ngram": Method(
        keys=COMMON_KEYS | {"prompt_lookup_min", "prompt_lookup_max", "num_prompt_lookup_candidates"},
        num_speculative_tokens=10,
        defaults={"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_prompt_lookup_candidates": 1},
    ),
    "nasd": Method(
        keys=COMMON_KEYS | {"ngram_size", "filler_top_k", "num_draft_branches"},
        num_speculative_tokens=5,
        defaults={"ngram_size": 4, "filler_top_k": 3, "num_draft_branches": 1},
    ),
}
"""The table of methods; defaults of a method stand here and nowhere else."""

METHOD_ALIASES = {
    "prompt_lookup": "ngram",
    "prompt_lookup_decoding": "ngram",
    "ngram_simple": "ngram",
    "draft": "draft_model",
    "draft_simple": "draft_model",
    "assisted": "draft_model",
    "standalone": "draft_model",
    "ngram_storage": "nasd",
    "ngram_assisted": "nasd",
    "off": "none",
    "disabled": "none",
}
