"""The ways of drafting: which keys each understands, and its defaults. A new method is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOTHING, CONFIDENCE, LAW = "nothing", "confidence", "law"
"""What a drafter can show a length policy of the token it is about to draft, and what a policy looks at."""


@dataclass(frozen=True)
class Method:
    """What one way of drafting understands.

    Args:
      keys: the keys of `SpeculativeConfig` that have a meaning for it.
      num_speculative_tokens: default draft length.
      defaults: defaults of other keys that depend on the method.
      needs_trees: whether its drafts are trees whatever its keys say.
      looks: what its drafter can show a length policy of what it is about to draft.
    """

    keys: frozenset[str]
    num_speculative_tokens: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs_trees: bool = False
    looks: frozenset[str] = frozenset({NOTHING})

    @property
    def length_policies(self) -> list[str]:
        """Names of the policies that the drafter can serve."""
        return [name for name, policy in LENGTH_POLICIES.items() if policy.looks_at in self.looks]


@dataclass(frozen=True)
class Policy:
    """What one length policy understands.

    Args:
      looks_at: what it must be shown of the next token's law.
      keys: of `SpeculativeConfig` -> the argument of the policy.
      modes: allowed values of ``length_policy_mode``.
    """

    looks_at: str = NOTHING
    keys: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()


_RULE_KEYS = {
    "target_acceptance_rate": "target_rate",
    "threshold_step": "step",
    "acceptance_momentum": "acceptance_momentum",
    "threshold_momentum": "threshold_momentum",
}

LENGTH_POLICIES: dict[str, Policy] = {
    "fixed": Policy(),
    "heuristic": Policy(),
    "confidence": Policy(CONFIDENCE, {"draft_threshold": "threshold"}),
    "egag": Policy(
        LAW,
        {
            "length_policy_mode": "mode",
            "min_draft_tokens": "min_tokens",
            "egag_ema_beta": "beta",
            "reference_entropy": "reference_entropy",
        },
        ("paper", "calibrated"),
    ),
    "adaedl": Policy(LAW, {"draft_threshold": "threshold", "entropy_scale": "entropy_scale", **_RULE_KEYS}),
    "acceptance": Policy(
        CONFIDENCE,
        {
            "length_policy_mode": "mode",
            "draft_threshold": "threshold",
            "initial_acceptance_rate": "initial_rate",
            **_RULE_KEYS,
        },
        ("paper", "code", "static"),
    ),
}
"""The table of length policies; their defaults stand in the policies themselves."""

POLICY_KEYS = frozenset(name for policy in LENGTH_POLICIES.values() for name in policy.keys)

COMMON_KEYS = POLICY_KEYS | {"num_speculative_tokens", "rejection_sample_method", "length_policy", "max_draft_nodes"}

TREE_KEYS = COMMON_KEYS - POLICY_KEYS - {"length_policy"}
"""Of methods whose drafts have a shape of their own."""

HANDED_ON = ("model", "revision", "dtype", "num_speculative_tokens")
"""Keys of a method that combines others which it hands on to those of them that know them."""

COMPOSITE_KEYS = frozenset({"drafters", "rejection_sample_method", *HANDED_ON})

ANY_LOOK = frozenset({NOTHING, CONFIDENCE, LAW})

METHODS: dict[str, Method] = {
    "none": Method(keys=frozenset(), num_speculative_tokens=0),
    "draft_model": Method(
        keys=COMMON_KEYS | {"model", "revision", "dtype", "draft_sample_method", "num_draft_branches"},
        num_speculative_tokens=5,
        defaults={"draft_sample_method": "probabilistic", "num_draft_branches": 1},
        looks=ANY_LOOK,
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
        looks=frozenset({NOTHING, CONFIDENCE}),
    ),
    "jacobi": Method(
        keys=COMMON_KEYS - {"max_draft_nodes"} | {"initial_guess"},
        num_speculative_tokens=16,
        defaults={"initial_guess": "repeat"},
    ),
    "lookahead": Method(
        keys=TREE_KEYS | {"window_size", "guess_set_size", "pool_from_prompt"},
        num_speculative_tokens=4,
        defaults={"window_size": 7, "guess_set_size": 7, "pool_from_prompt": True},
        needs_trees=True,
    ),
    "suffix": Method(
        keys=COMMON_KEYS
        | {
            "num_draft_branches",
            "shared",
            "state_file",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        },
        num_speculative_tokens=16,
        defaults={
            "max_draft_nodes": 24,
            "num_draft_branches": 4,
            "shared": False,
            "suffix_decoding_max_tree_depth": 24,
            "suffix_decoding_max_cached_requests": 10_000,
            "suffix_decoding_max_spec_factor": 4.0,
            "suffix_decoding_min_token_prob": 0.1,
        },
    ),
    "rest": Method(
        keys=COMMON_KEYS
        | {
            "num_draft_branches",
            "datastore",
            "retrieval_match_min",
            "retrieval_match_max",
            "retrieval_max_hits",
            "retrieval_dynamic_index",
        },
        num_speculative_tokens=10,
        defaults={
            "max_draft_nodes": 32,
            "num_draft_branches": 32,
            "retrieval_match_min": 1,
            "retrieval_match_max": 16,
            "retrieval_max_hits": 512,
            "retrieval_dynamic_index": True,
        },
    ),
    "token_recycling": Method(
        keys=TREE_KEYS | {"num_candidates", "shared", "initial_state", "state_file"},
        num_speculative_tokens=6,
        defaults={"num_candidates": 8, "shared": False, "initial_state": "auto"},
        needs_trees=True,
    ),
    "layer_skip": Method(
        keys=COMMON_KEYS
        | {
            "layer_set",
            "skipped_attention",
            "skipped_mlp",
            "exit_layer",
            "layer_search",
            "draft_sample_method",
            "num_draft_branches",
        },
        num_speculative_tokens=8,
        defaults={"length_policy": "acceptance", "draft_sample_method": "probabilistic", "num_draft_branches": 1},
        looks=ANY_LOOK,
    ),
    "quantized_self": Method(
        keys=COMMON_KEYS
        | {
            "quantization_group_size",
            "quantize_head",
            "layer_set",
            "skipped_attention",
            "skipped_mlp",
            "draft_sample_method",
            "num_draft_branches",
        },
        num_speculative_tokens=3,
        defaults={
            "quantization_group_size": 32,
            "quantize_head": False,
            "draft_sample_method": "probabilistic",
            "num_draft_branches": 1,
        },
        looks=ANY_LOOK,
    ),
    "union": Method(
        keys=COMPOSITE_KEYS | {"max_draft_nodes"},
        num_speculative_tokens=0,
        defaults={"max_draft_nodes": 32},
        needs_trees=True,
    ),
    "first": Method(
        keys=COMPOSITE_KEYS | {"min_expected_tokens"}, num_speculative_tokens=0, defaults={"min_expected_tokens": 0.5}
    ),
}
"""The table of methods; defaults of a method stand here and nowhere else."""

COMPOSITIONS = {">": "first", "+": "union"}
"""How methods are combined in a name, the loosest first: "ngram>suffix+draft_model"."""

METHOD_ALIASES = {
    "draft_and_verify": "layer_skip",
    "self_speculative": "layer_skip",
    "early_exit": "layer_skip",
    "qspec": "quantized_self",
    "prompt_lookup": "ngram",
    "prompt_lookup_decoding": "ngram",
    "ngram_simple": "ngram",
    "ngram_gpu": "ngram",
    "draft": "draft_model",
    "draft_simple": "draft_model",
    "assisted": "draft_model",
    "standalone": "draft_model",
    "ngram_storage": "nasd",
    "ngram_assisted": "nasd",
    "jacobi_decoding": "jacobi",
    "lookahead_decoding": "lookahead",
    "lade": "lookahead",
    "suffix_decoding": "suffix",
    "sam": "suffix",
    "sam_decoding": "suffix",
    "retrieval": "rest",
    "recycling": "token_recycling",
    "off": "none",
    "disabled": "none",
}
