"""Methods that draft from text: their options and entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from foredraft.config.drafting import BranchOptions, DraftOptions, branches, draft_length, node_limit
from foredraft.config.options import flag, number, one_of, option, path, whole
from foredraft.errors import ConfigError
from foredraft.methods import Method
from foredraft.methods.lengths import CONFIDENCE, NOTHING, LengthOptions
from foredraft.retrieval.datastore import MAX_DEPTH, Lookup

MATCHES = ("latest", "earliest")
"""Order in which several occurrences of a suffix are used."""

RUNNER_UP_WEIGHT = 0.25  # weight of a token that the target ranked high but did not emit; an emitted token weighs 1


@dataclass(frozen=True, kw_only=True)
class NasdOptions(LengthOptions, BranchOptions):
    """Keys of drafting from an n-gram storage."""

    method: ClassVar[str] = "nasd"
    looks: ClassVar[frozenset[str]] = frozenset({NOTHING, CONFIDENCE})
    num_speculative_tokens: int = draft_length(5)
    max_draft_nodes: int | None = node_limit()
    ngram_size: int = option(whole(2), 4, "n of the longest n-gram, the predicted token included")
    storage: str = option(
        one_of(("levels", "single"), {"ngramstorage": "levels", "onelevelngramstorage": "single"}),
        "levels",
        "levels: contexts of n - 1 tokens down to one token, of which the longest known one is used; single: contexts "
        "of n - 1 tokens only",
    )
    filler_top_k: int = option(
        whole(1), 3, "number of the target's top tokens per position that enter the storage; 1 stores emitted ones only"
    )
    filler_weight: float = option(
        number(0.0, 1.0, above=True),
        RUNNER_UP_WEIGHT,
        "weight of a top token that was not emitted; an emitted one weighs 1",
    )
    unknown: str = option(
        one_of(("stop", "random")), "stop", "action at an unknown context: end the draft, or draft a random token"
    )
    shared: bool = option(flag(), False, "share what is learned among all requests")
    state_file: str | None = option(path(), help="file that keeps the shared storage from run to run")

    def check(self) -> None:
        super().check()
        if self.state_file is not None and not self.shared:
            raise ConfigError("state_file needs a storage that requests share; add shared=true, or leave it out")


@dataclass(frozen=True, kw_only=True)
class NGramOptions(LengthOptions, DraftOptions):
    """Keys of prompt lookup."""

    method: ClassVar[str] = "ngram"
    num_speculative_tokens: int = draft_length(10)
    max_draft_nodes: int | None = node_limit()
    prompt_lookup_min: int = option(whole(1), 2, "length of the shortest suffix to look up")
    prompt_lookup_max: int = option(whole(1), 5, "length of the longest suffix to look up")
    num_prompt_lookup_candidates: int = option(whole(1), 1, "continuations that are merged into one tree")
    prompt_lookup_match: str = option(
        one_of(MATCHES), MATCHES[0], "occurrence of the suffix whose continuation is used first"
    )

    @property
    def num_branches(self) -> int:
        return self.num_prompt_lookup_candidates

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> NGramOptions:
        """Read the options; if one bound of the suffix length is given, the default of the other is adjusted to it."""
        shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        defaults: dict[str, Any] = {}
        if isinstance(longest, int):
            defaults["prompt_lookup_min"] = min(cls.prompt_lookup_min, longest)
        if isinstance(shortest, int):
            defaults["prompt_lookup_max"] = max(cls.prompt_lookup_max, shortest)
        return super().read({**defaults, **given})

    def check(self) -> None:
        super().check()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}; "
                "lower the first or raise the second"
            )


@dataclass(frozen=True, kw_only=True)
class RestOptions(LengthOptions, BranchOptions):
    """Keys of retrieval from a datastore."""

    method: ClassVar[str] = "rest"
    num_speculative_tokens: int = draft_length(10)
    max_draft_nodes: int = node_limit(32)
    num_draft_branches: int = branches(32)
    datastore: str | None = option(
        path(is_read=True),
        help="directory that foredraft datastore build wrote; by default the datastore of a zoo model",
    )
    retrieval_match_min: int = option(whole(1, 64), 1, "length of the shortest suffix to look up")
    retrieval_match_max: int = option(whole(1, 64), 16, "length of the longest suffix to look up")
    retrieval_max_hits: int = option(whole(1, 1 << 20), 512, "largest number of occurrences to read per step")
    retrieval_dynamic_index: bool = option(flag(), True, "search the request's own text, too")

    def check(self) -> None:
        super().check()
        if self.num_speculative_tokens > MAX_DEPTH:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; method 'rest' drafts at most {MAX_DEPTH} "
                "tokens deep; lower it"
            )
        if self.retrieval_match_min > self.retrieval_match_max:
            raise ConfigError(
                f"retrieval_match_min={self.retrieval_match_min} is more than "
                f"retrieval_match_max={self.retrieval_match_max}; lower the first or raise the second"
            )

    @property
    def lookup(self) -> Lookup:
        """Parameters of a datastore lookup."""
        return Lookup(
            match_min=self.retrieval_match_min,
            match_max=self.retrieval_match_max,
            depth=max(1, self.num_speculative_tokens),
            max_hits=self.retrieval_max_hits,
        )


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(LengthOptions, BranchOptions):
    """Keys of suffix decoding."""

    method: ClassVar[str] = "suffix"
    num_speculative_tokens: int = draft_length(16)
    max_draft_nodes: int = node_limit(24)
    num_draft_branches: int = branches(4)
    shared: bool = option(flag(), False, "share the outputs of all requests")
    state_file: str | None = option(path(), help="file that keeps the shared outputs from run to run")
    suffix_decoding_max_tree_depth: int = option(
        whole(2, 1024), 24, "longest string to count in tokens, context and continuation together"
    )
    suffix_decoding_max_cached_requests: int = option(
        whole(0), 10_000, "largest number of past outputs to keep when shared"
    )
    suffix_decoding_max_spec_factor: float = option(number(0.0, above=True), 4.0, "drafted tokens per matched token")
    suffix_decoding_min_token_prob: float = option(
        number(0.0, 1.0), 0.1, "estimated probability below which a token is not drafted"
    )

    def check(self) -> None:
        super().check()
        if self.state_file is not None and not self.shared:
            raise ConfigError("state_file needs a history that requests share; add shared=true, or leave it out")


@dataclass(frozen=True, kw_only=True)
class TokenRecyclingOptions(DraftOptions):
    """Keys of token recycling."""

    method: ClassVar[str] = "token_recycling"
    drafts_trees: ClassVar[bool] = True
    num_speculative_tokens: int = draft_length(6, least=1)
    max_draft_nodes: int | None = node_limit(help="nodes of the tree, root included; by default 16 on a CPU, else 80")
    num_candidates: int = option(whole(1), 8, "number of successors to keep per token")
    shared: bool = option(flag(), False, "share what is learned among all requests")
    initial_state: str = option(
        one_of(("auto", "vocabulary", "prompt", "text", "empty")),
        "auto",
        "successors known before the first step. text: pairs of adjacent tokens in the prompt. prompt: text, and the "
        "target's top tokens at every prompt position, which adds the cost of their logits to the prefill. vocabulary: "
        "prompt, and the target's top tokens after each token alone, which costs a prefill as long as the vocabulary. "
        "empty: none. auto: text, and the table of a zoo model",
    )
    state_file: str | None = option(path(), help="file that keeps the learned table from run to run")


METHODS = (
    Method(
        NasdOptions,
        "foredraft.drafters.lookup.nasd:build",
        summary="the most frequent successors of the last tokens in this row",
        aliases=("ngram_storage", "ngram_assisted"),
    ),
    Method(
        NGramOptions,
        "foredraft.drafters.lookup.ngram:build",
        summary="the continuation of the row's last tokens at their latest occurrence in prompt or output",
        aliases=("prompt_lookup", "prompt_lookup_decoding", "ngram_simple", "ngram_gpu"),
    ),
    Method(
        RestOptions,
        "foredraft.drafters.lookup.rest:build",
        summary="the continuations of the row's last tokens in a datastore of other texts",
        aliases=("retrieval",),
    ),
    Method(
        SuffixOptions,
        "foredraft.drafters.lookup.suffix:build",
        summary="the most frequent continuations of the row's last tokens in earlier text",
        aliases=("suffix_decoding", "sam", "sam_decoding"),
    ),
    Method(
        TokenRecyclingOptions,
        "foredraft.drafters.lookup.token_recycling:build",
        summary="the tokens that the target ranked highest after a token the last time",
        aliases=("recycling",),
    ),
)
