"""What people write: a speculative config as JSON, a file of it, or the bare name of a method; lists by comma;
and keys under the names of other systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.folders import parsed_json

PROFILE_KEY = "speculative_config"
"""Under which a file of ``foredraft tune`` names the way of drafting that was chosen."""


def read_text(text: str) -> Any:
    """JSON, the JSON in ``@file``, or the bare name of a method, as a mapping; of a profile, what was chosen.

    Raises: ConfigError for a file that cannot be read, text that is not JSON, and a path where a method stands.
    """
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
        found = parsed_json(text)
    except ValueError as error:
        raise ConfigError(f'{source} is not valid JSON: {error}; write for instance {{"method": "ngram"}}') from None
    is_profile = isinstance(found, dict) and PROFILE_KEY in found and "facts" in found
    return found[PROFILE_KEY] if is_profile else found


def by_comma(text: str) -> list[str]:
    """``a, b`` is "a" and "b"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def tuned(profile_file: str) -> dict[str, Any] | None:
    """The way of drafting that a profile names; None for one that names none, as those of ``tune profile``."""
    try:
        chosen = parsed_json(Path(profile_file).expanduser().read_text(encoding="utf-8"))[PROFILE_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # what is wrong with it is said where it is loaded
    return chosen if isinstance(chosen, dict) else None


def _check_is_no_path(text: str) -> None:
    """Say how a file or a model is given where one stands in the place of a method."""
    if text.endswith(".json"):
        raise ConfigError(f"speculative config {text!r} is neither a method nor JSON; to read a file, write '@{text}'")
    if "/" in text or text.startswith("zoo:") or text.endswith(".gguf"):
        raise ConfigError(
            f"speculative config {text!r} is neither a method nor JSON; to draft with that model, write "
            f'{{"method": "draft_model", "model": "{text}"}}'
        )


ALIASES = {
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
    # trees and typical acceptance, Medusa's and vLLM's names
    "head_tree": "speculative_token_tree",
    "medusa_choices": "speculative_token_tree",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    # shorter or older spellings
    "drafter": "model",
    "draft_dtype": "dtype",
    "ngram_n": "ngram_size",
    "acceptance": "rejection_sample_method",
    "num_lookup_candidates": "num_prompt_lookup_candidates",
    # the plain functions of the original description, see dev/from_the_documents.md
    "gamma": "num_speculative_tokens",
    "gamma_max": "num_speculative_tokens",
    "gamma_min": "min_draft_tokens",
    "n": "ngram_size",
    "ngramstorage": "storage",
    "num_output_tokens": "num_speculative_tokens",
    "max_num_draft": "max_draft_nodes",
    "use_egag": "length_policy",
    "stop_if_unknown": "unknown",
}
"""Names of other systems for keys of `SpeculativeConfig`. SGLang's ``num_draft_tokens`` counts nodes,
root included; vLLM's K and its kin count drafted tokens, the bonus not among them."""

IMPLIED = {
    "prompt_lookup_num_tokens": {"method": "ngram"},
    "assistant_confidence_threshold": {"length_policy": "confidence"},
    "draft_p_min": {"length_policy": "confidence"},
    "spec_draft_p_min": {"length_policy": "confidence"},
    "use_egag": {"length_policy_mode": "paper"},
}
"""Aliases that say more than their value: other keys, set where they are not given."""

SWITCHES: dict[str, dict[bool, str | None]] = {
    "use_egag": {True: "egag", False: None},
    "stop_if_unknown": {True: "stop", False: "random"},
}
"""Aliases that are on or off, for keys with words: what they stand for; None for nothing that need be said."""


def spelled_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys, those of `speculative_generate` without the ones that its ``use_egag`` makes meaningless.

    With EGAG, ``gamma_max`` is the longest draft and takes the place of ``gamma``; without it, ``gamma`` is the length
    of every draft, and the other three do nothing.
    """
    use_egag, gamma_max = given.get("use_egag"), given.get("gamma_max")
    unused: set[str] = set()
    if use_egag is False:
        unused = {"gamma_min", "gamma_max", "egag_ema_beta"}
    elif use_egag is True:
        unused = {"gamma_max"} if gamma_max is None else {"gamma"}
    return {key: value for key, value in given.items() if key not in unused}


def switched(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys, switches as the words that they stand for.

    Raises: ConfigError for a switch that is neither true nor false.
    """
    values = dict(given)
    for name in given.keys() & SWITCHES.keys():
        if not isinstance(given[name], bool):
            raise ConfigError(f"{owner}.{name} is {given[name]!r}; it must be true or false")
        word = SWITCHES[name][given[name]]
        if word is None:
            del values[name]
        else:
            values[name] = word
    return values
