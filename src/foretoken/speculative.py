"""How drafts are made and accepted: `SpeculativeConfig`. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from foretoken.engine.errors import ConfigError
from foretoken.foreign import METHODS_ELSEWHERE, SPECULATIVE_KEYS, method_elsewhere
from foretoken.keywords import flag, key, number, one_of, spelling, strict_keywords, text, whole, whole_numbers
from foretoken.methods import (
    COMMON_KEYS,
    COMPOSITIONS,
    HANDED_ON,
    LENGTH_POLICIES,
    METHOD_ALIASES,
    METHODS,
    POLICY_KEYS,
    Method,
)

SPECULATIVE_ALIASES = {
    # transformers
    "assistant_model": "model",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "max_matching_ngram_size": "prompt_lookup_max",
    "num_assistant_tokens_schedule": "length_policy",
    "assistant_confidence_threshold": "draft_threshold",
    "assistant_early_exit": "exit_layer",
    # SGLang
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_model_revision": "revision",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_num_draft_tokens": "max_draft_nodes",
    "speculative_eagle_topk": "num_draft_branches",
    "speculative_ngram_min_match_window_size": "prompt_lookup_min",
    "speculative_ngram_max_match_window_size": "prompt_lookup_max",
    # llama.cpp
    "spec_type": "method",
    "md": "model",
    "model_draft": "model",
    "spec_draft_model": "model",
    "spec_draft_n_max": "num_speculative_tokens",
    "draft": "num_speculative_tokens",
    "draft_n": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    "draft_n_max": "num_speculative_tokens",
    "draft_p_min": "draft_threshold",
    "spec_draft_p_min": "draft_threshold",
    # mlx-lm, LM Studio
    "draft_model": "model",
    "num_draft_tokens": "num_speculative_tokens",
    # shorter or older spellings
    "drafter": "model",
    "draft_dtype": "dtype",
    "ngram_n": "ngram_size",
    "acceptance": "rejection_sample_method",
    "num_lookup_candidates": "num_prompt_lookup_candidates",
}
"""Names of other systems for keys of `SpeculativeConfig`. SGLang's ``num_draft_tokens`` counts nodes,
root included; vLLM's K and its kin count drafted tokens, the bonus not among them."""

_IMPLIED = {
    "prompt_lookup_num_tokens": {"method": "ngram"},
    "assistant_confidence_threshold": {"length_policy": "confidence"},
    "draft_p_min": {"length_policy": "confidence"},
    "spec_draft_p_min": {"length_policy": "confidence"},
}

_DRAFT_SAMPLE_METHODS = {"greedy": "greedy", "probabilistic": "probabilistic", "gumbel": "probabilistic"}
_REJECTION_SAMPLE_METHODS = {
    "match": "match",
    "standard": "standard",
    "rejection": "standard",
    "rejection_sampler": "standard",
    "block": "block",
}
_LENGTH_POLICIES = {
    "fixed": "fixed",
    "constant": "fixed",
    "heuristic": "heuristic",
    "heuristic_transient": "heuristic",
    **{name: name for name in LENGTH_POLICIES},
}
_MODES = sorted({mode for policy in LENGTH_POLICIES.values() for mode in policy.modes})


@strict_keywords(SPECULATIVE_ALIASES, spelling, _IMPLIED, SPECULATIVE_KEYS)
@dataclass(frozen=True, repr=False)
class SpeculativeConfig:
    """How drafts are made and accepted. Keys are vLLM's; those of other systems are aliases.

    A key left at None takes the default of the method, from the table `METHODS`. Keys without a meaning for
    the method stay None and may not be given.

    Args:
      method: ``draft_model``, ``ngram`` (prompt lookup), ``nasd`` (n-gram storage) or ``none``. Left out, it
        follows from the other keys: a model means ``draft_model``, a key of one method means that method.
      model: drafter of ``draft_model``: a path, a hub id, ``zoo:NAME`` or a loaded model; None where the
        target brings its own (``zoo:X``).
      num_speculative_tokens: longest draft, the bonus not counted.
      revision, dtype: of a drafter that is loaded by name.
      draft_sample_method: "greedy" or "probabilistic".
      rejection_sample_method: "match" (equal tokens for any draft), "standard" (rejection sampling), "block".
      num_draft_branches: siblings per drafted position; 1 is a chain.
      max_draft_nodes: limit of a draft tree, root included; None for what branches and length amount to, and for
        what suits the device (``token_recycling``: 16 on a CPU, else 80).
      length_policy: "fixed", "heuristic", "confidence", "egag", "adaedl" or "acceptance".
      length_policy_mode: of "egag": "calibrated" or "paper"; of "acceptance": "code", "paper" or "static".
      draft_threshold: confidence below which a draft ends ("confidence", "acceptance"), or bound of "adaedl".
      min_draft_tokens, egag_ema_beta, reference_entropy: of "egag".
      entropy_scale: of "adaedl".
      initial_acceptance_rate: of "acceptance".
      target_acceptance_rate, threshold_step, acceptance_momentum, threshold_momentum: how the threshold of "adaedl" and
        "acceptance" moves.
      prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that is looked up.
      num_prompt_lookup_candidates: continuations that are merged into one tree.
      ngram_size: n of the n-gram storage, the predicted token included.
      filler_top_k: how many of the target's most likely tokens enter the storage per verified position.
      initial_guess: of ``jacobi``: "repeat" the last token, or tokens of the "prompt".
      window_size, guess_set_size: W and G of ``lookahead``; its N is num_speculative_tokens + 1.
      pool_from_prompt: whether n-grams of prompt and output enter the pool of ``lookahead``.
      num_candidates: successors that ``token_recycling`` keeps per token.
      shared: whether requests learn from each other; otherwise what a request taught is gone with it.
      initial_state: of ``token_recycling``: "vocabulary" (what the target says behind every token alone, at the cost
        of a prompt as long as the vocabulary), "prompt", "empty", or "auto": "prompt", and what a zoo model brings.
      layer_set: file with the sublayers that ``layer_skip`` leaves out, from ``foretoken tune layer-skip``.
      skipped_attention, skipped_mlp: the same, as layer indices; exit_layer: everything from this layer on.
      layer_search: "swift" lets ``layer_skip`` look for a better set while it decodes, from the given one or its own.
      quantization_group_size: inputs that share a scale in the 4-bit weights of ``quantized_self``.
      quantize_head: whether ``quantized_self`` has the output embedding in 4 bits, too: cheaper, and less agreement.
      drafters: of ``union`` and ``first``: names, mappings or configs; "a+b" is the union of a and b, "a>b" takes b
        where a expects too little. A model or length that is given beside them is handed on to those that know it.
      min_expected_tokens: of ``first``: accepted tokens that a draft must promise, by experience.
      state_file: what was learned and saved before, to start from; a ``suffix`` that is shared also saves to it.
      datastore: of ``rest``: the directory that foretoken datastore build wrote; None where the target brings its own.
      retrieval_match_min, retrieval_match_max: of ``rest``: shortest and longest context that is looked up.
      retrieval_max_hits: of ``rest``: occurrences that are read per step.
      retrieval_dynamic_index: of ``rest``: whether the request's own text is looked up too.
      suffix_decoding_max_tree_depth: of ``suffix``: longest string that is counted, context and continuation together.
      suffix_decoding_max_cached_requests: of ``suffix``: past outputs that are remembered when it is shared.
      suffix_decoding_max_spec_factor: of ``suffix``: drafted tokens per matched token.
      suffix_decoding_min_token_prob: of ``suffix``: estimated chance below which a token is not drafted.

    Raises: ConfigError for an unknown key, a value out of range, or a key that does not belong to the method.
    """

    method: str | None = None
    model: Any = None
    num_speculative_tokens: int | None = key(whole(0))
    revision: str | None = None
    dtype: Any = None
    draft_sample_method: str | None = key(one_of(_DRAFT_SAMPLE_METHODS))
    rejection_sample_method: str | None = key(one_of(_REJECTION_SAMPLE_METHODS))
    num_draft_branches: int | None = key(whole(1))
    max_draft_nodes: int | None = key(whole(2))
    length_policy: str | None = key(one_of(_LENGTH_POLICIES))
    length_policy_mode: str | None = key(one_of({mode: mode for mode in _MODES}))
    draft_threshold: float | None = key(number(0.0, 1.0))
    min_draft_tokens: int | None = key(whole(0))
    egag_ema_beta: float | None = key(number(0.0, 1.0))
    reference_entropy: float | None = key(number(0.0, above=True))
    entropy_scale: float | None = key(number(0.0))
    initial_acceptance_rate: float | None = key(number(0.0, 1.0))
    target_acceptance_rate: float | None = key(number(0.0, 1.0))
    threshold_step: float | None = key(number(0.0, 1.0))
    acceptance_momentum: float | None = key(number(0.0, 1.0))
    threshold_momentum: float | None = key(number(0.0, 1.0))
    prompt_lookup_min: int | None = key(whole(1))
    prompt_lookup_max: int | None = key(whole(1))
    num_prompt_lookup_candidates: int | None = key(whole(1))
    ngram_size: int | None = key(whole(2))
    filler_top_k: int | None = key(whole(1))
    initial_guess: str | None = key(one_of({"repeat": "repeat", "prompt": "prompt"}))
    window_size: int | None = key(whole(1, 1024))
    guess_set_size: int | None = key(whole(0, 1024))
    pool_from_prompt: bool | None = key(flag())
    num_candidates: int | None = key(whole(1))
    shared: bool | None = key(flag())
    initial_state: str | None = key(one_of({name: name for name in ("auto", "vocabulary", "prompt", "empty")}))
    state_file: str | None = key(text())
    datastore: str | None = key(text())
    retrieval_match_min: int | None = key(whole(1, 64))
    retrieval_match_max: int | None = key(whole(1, 64))
    retrieval_max_hits: int | None = key(whole(1, 1 << 20))
    retrieval_dynamic_index: bool | None = key(flag())
    suffix_decoding_max_tree_depth: int | None = key(whole(2, 1024))
    suffix_decoding_max_cached_requests: int | None = key(whole(0))
    suffix_decoding_max_spec_factor: float | None = key(number(0.0, above=True))
    suffix_decoding_min_token_prob: float | None = key(number(0.0, 1.0))
    layer_set: str | None = key(text())
    skipped_attention: tuple[int, ...] | None = key(whole_numbers())
    skipped_mlp: tuple[int, ...] | None = key(whole_numbers())
    exit_layer: int | None = key(whole(1))
    layer_search: str | None = key(one_of({"swift": "swift"}))
    quantization_group_size: int | None = key(whole(1))
    quantize_head: bool | None = key(flag())
    drafters: Any = None
    min_expected_tokens: float | None = key(number(0.0))

    def __post_init__(self) -> None:
        name = self._method_name()
        self._set("method", name)
        self._check_keys(name)
        self._fill_defaults(METHODS[name])
        self._check_values()
        self._compose()
        self._check_policy(METHODS[name])
        self._check_acceptance()

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        if self.model is not None and not isinstance(self.model, (str, os.PathLike)):
            given["model"] = type(self.model)  # a loaded model shows all of its layers
        return f"SpeculativeConfig({', '.join(f'{name}={_shown(value)}' for name, value in given.items())})"

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Read what a user gave: nothing, a mapping, JSON, ``@file`` with JSON, a method's name, or a config.

        Raises: ConfigError when it is none of these, or not valid.
        """
        if value is None:
            return cls(method="none")
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = _read_text(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative config is {value!r}; give a JSON object, a mapping, @FILE or None")
        return cls(**{str(name): item for name, item in value.items()})

    @property
    def is_speculative(self) -> bool:
        return self.method != "none"

    @property
    def title(self) -> str:
        """The method as one would write it: ``ngram``, ``suffix+draft_model``."""
        sign = next((sign for sign, method in COMPOSITIONS.items() if method == self.method), None)
        return str(self.method) if sign is None else sign.join(part.title for part in self.drafters)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _given(self) -> set[str]:
        return {f.name for f in dataclasses.fields(self) if f.name != "method" and getattr(self, f.name) is not None}

    def _method_name(self) -> str:
        """The method, under its own name; inferred from the keys where it was left out."""
        if self.method is None:
            return self._inferred_method()
        if not isinstance(self.method, str):
            raise ConfigError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        name = spelling(self.method).lower()
        _check_available(name)
        for sign, composition in COMPOSITIONS.items():
            if sign in name:
                if self.drafters is not None:
                    raise ConfigError(f"method {self.method!r} names its drafters, and drafters does too; give one")
                self._set("drafters", [part.strip() for part in name.split(sign)])
                return composition
        name = METHOD_ALIASES.get(name, name)
        if name not in METHODS:
            near = get_close_matches(name, [*METHODS, *METHOD_ALIASES, *METHODS_ELSEWHERE], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            if near and near[0] in METHODS_ELSEWHERE:
                hint += "That is not available in this version; "
            raise ConfigError(f"method {self.method!r} is not known; {hint}choose one of {', '.join(METHODS)}")
        return name

    def _inferred_method(self) -> str:
        special = self._given() - COMMON_KEYS
        single = {name: method for name, method in METHODS.items() if "drafters" not in method.keys}
        fitting = [name for name, method in single.items() if special and special <= method.keys]
        if len(fitting) != 1:
            raise ConfigError(
                f"the method does not follow from the keys {sorted(self._given())}; add method, one of "
                f"{', '.join(METHODS)}"
            )
        return fitting[0]

    def _check_keys(self, name: str) -> None:
        for name_of_key in sorted(self._given() - METHODS[name].keys):
            owners = [other for other, method in METHODS.items() if name_of_key in method.keys]
            remedy = "leave it out"
            if "drafters" in METHODS[name].keys:
                remedy += f", or give it to a part: drafters=[{{'method': {owners[0]!r}, {name_of_key!r}: ...}}, ...]"
            raise ConfigError(
                f"key {name_of_key!r} has no meaning for method {name!r}, only for {', '.join(owners)}; {remedy}"
            )

    def _fill_defaults(self, method: Method) -> None:
        defaults = {
            "num_speculative_tokens": method.num_speculative_tokens,
            "rejection_sample_method": "match",
            **({"length_policy": "fixed"} if "length_policy" in method.keys else {}),
            **method.defaults,
        }
        self._order_lookup(defaults)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                self._set(name, value)

    def _order_lookup(self, defaults: dict[str, Any]) -> None:
        """A single bound of the lookup moves the other one's default along."""
        if "prompt_lookup_min" not in defaults:
            return
        if isinstance(self.prompt_lookup_max, int):
            defaults["prompt_lookup_min"] = min(defaults["prompt_lookup_min"], self.prompt_lookup_max)
        if isinstance(self.prompt_lookup_min, int):
            defaults["prompt_lookup_max"] = max(defaults["prompt_lookup_max"], self.prompt_lookup_min)

    def _check_values(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None and "check" in item.metadata:
                self._set(item.name, item.metadata["check"](item.name, value))
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}; lower the first or "
                "raise the second"
            )

    def _compose(self) -> None:
        """Make configs of the drafters that this one combines, with the keys that are handed on to them.

        Raises: ConfigError for fewer than two, for a rule other than "match", and for what a drafter does not take.
        """
        if "drafters" not in METHODS[str(self.method)].keys:
            return
        if isinstance(self.drafters, (str, Mapping)) or not isinstance(self.drafters, Sequence):
            raise ConfigError(f"method {self.method!r} needs drafters, a list of two or more; got {self.drafters!r}")
        handed_on = {name: getattr(self, name) for name in HANDED_ON if getattr(self, name) not in (None, 0)}
        parts = tuple(_part(part, handed_on) for part in self.drafters)
        rules = {part.rejection_sample_method for part in (*parts, self)}
        if rules != {"match"}:
            raise ConfigError(
                f"method {self.method!r} is exact under rejection_sample_method='match' only; it got "
                f"{', '.join(sorted(map(str, rules - {'match'})))}"
            )
        if len(parts) < 2 or any(part.method == "none" for part in parts):
            names = ", ".join(str(part.method) for part in parts)
            raise ConfigError(f"method {self.method!r} combines two or more drafters; got {names or 'none'}")
        self._set("drafters", parts)
        self._set("num_speculative_tokens", max(part.num_speculative_tokens or 0 for part in parts))

    @property
    def model_part(self) -> SpeculativeConfig | None:
        """The config of the drafter that is a model: this one or the first such part."""
        if self.method == "draft_model":
            return self
        return next((part.model_part for part in self.drafters or () if part.model_part is not None), None)

    def without_model(self) -> SpeculativeConfig:
        """The same, holding on to no loaded model."""
        parts = self.drafters if self.drafters is None else tuple(part.without_model() for part in self.drafters)
        return dataclasses.replace(self, model=None, drafters=parts)

    def _check_policy(self, method: Method) -> None:
        """Refuse policies that the drafter cannot serve, and settings that the policy does not have."""
        if self.length_policy is None:
            return
        name = str(self.length_policy)
        policy = LENGTH_POLICIES[name]
        if policy.looks_at not in method.looks:
            raise ConfigError(
                f"length_policy {name!r} looks at the {policy.looks_at} of the drafter, and method {self.method!r} has "
                f"none; choose one of {', '.join(method.length_policies)}"
            )
        for given in sorted(self._given() & POLICY_KEYS - policy.keys.keys()):
            owners = [other for other, its in LENGTH_POLICIES.items() if given in its.keys]
            raise ConfigError(
                f"key {given!r} has no meaning for length_policy {name!r}, only for {', '.join(owners)}; leave it out, "
                "or set length_policy"
            )
        mode = self.length_policy_mode
        if mode is not None and mode not in policy.modes:
            raise ConfigError(f"length_policy {name!r} has no mode {mode!r}; choose one of {', '.join(policy.modes)}")

    def _check_acceptance(self) -> None:
        """Refuse rules that are not exact for the drafts this config makes.

        "match" takes any draft. "standard" takes samples of a known law, and deterministic drafts, whose
        tokens are point masses. "block" takes chains only.
        """
        widest = max(self.num_draft_branches or 1, self.num_prompt_lookup_candidates or 1)
        if self.rejection_sample_method == "block" and METHODS[str(self.method)].needs_trees:
            raise ConfigError(
                f"rejection_sample_method='block' takes chains, and method {self.method!r} drafts trees; use 'match' "
                "or 'standard'"
            )
        if self.rejection_sample_method == "block" and widest > 1:
            raise ConfigError(
                f"rejection_sample_method='block' takes chains, and this config drafts {widest} branches; "
                "use 'match' or 'standard', or one branch"
            )


def _check_available(name: str) -> None:
    """Refuse methods that people know and this version does not have."""
    what = method_elsewhere(name)
    if what is not None and name not in METHODS:
        raise ConfigError(
            f"method {name!r} ({what}) is not available in this version; choose one of {', '.join(METHODS)}, or "
            "compare those that fit with foretoken bench --methods all --model MODEL"
        )


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _part(value: Any, handed_on: Mapping[str, Any]) -> SpeculativeConfig:
    """The config of one drafter of several, with those keys of the whole that its method knows and it was not given."""
    if isinstance(value, SpeculativeConfig):
        return value
    given = {"method": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"drafters holds {value!r}; every one is a method's name, a mapping or a config")
    method = SpeculativeConfig.parse(given).method
    known = {name: item for name, item in handed_on.items() if name in METHODS[str(method)].keys}
    return SpeculativeConfig.parse({**known, **given})


def _read_text(text: str) -> Any:
    """JSON, the JSON in ``@file``, or the bare name of a method."""
    source = "speculative config"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"speculative config {source!r} cannot be read: {error.strerror}; check the path"
            ) from None
    text = text.strip()
    if not text:
        raise ConfigError(f'{source} is empty; write for instance {{"method": "ngram"}}, or None for plain decoding')
    if text[0] not in '{["0123456789':
        _check_is_no_path(text)
        return {"method": text}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{source} is not valid JSON: {error}; write for instance {{"method": "ngram"}}') from None


def _check_is_no_path(text: str) -> None:
    """Say how a file or a model is given where one stands in the place of a method."""
    if text.endswith(".json"):
        raise ConfigError(f"speculative config {text!r} is neither a method nor JSON; to read a file, write '@{text}'")
    if "/" in text or text.startswith("zoo:") or text.endswith(".gguf"):
        raise ConfigError(
            f"speculative config {text!r} is neither a method nor JSON; to draft with that model, write "
            f'{{"method": "draft_model", "model": "{text}"}}'
        )
