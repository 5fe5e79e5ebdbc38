"""The methods to compare, as named by the user."""

from __future__ import annotations

import logging
from typing import Any

from foredraft.config.drafting import FIXED
from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.written import read_text
from foredraft.errors import ConfigError
from foredraft.loading.sources import check_exists
from foredraft.methods import methods, recognized

logger = logging.getLogger("foredraft")

PLAIN = "plain"
ALL = "all"
COMPOSITIONS = ("suffix+draft_model", "ngram>token_recycling")
"""Combinations that "all" adds to the single methods."""


def read_candidates(
    text: str, draft_model: str | None, num_draft_tokens: int | None, *, is_forced: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the methods that a user names: separated by commas, as ``a+b``, ``a>b``, JSON or ``@FILE``, or "all".

    Args:
      draft_model: model or head for the methods that need one. A head goes to methods that draft with heads, a model to
        the others.
      num_draft_tokens: draft length of all methods; None keeps the default of every method.
      is_forced: True to fix draft lengths that the governor would choose. A length policy that the user gives is kept.

    Returns: speculative configs by the name shown in tables.
    Raises: ConfigError for anything that is not a method, and for "auto" without the governor; CheckpointError for a
      draft model that does not exist.
    """
    check_exists(draft_model)
    found: dict[str, dict[str, Any]] = {}
    for part in split_outside_brackets(text):
        single = (name for name, method in methods().items() if name != "none" and not method.combines)
        names = [*single, *COMPOSITIONS]
        for given in [{"method": name} for name in names] if part == ALL else [_read(part)]:
            if part.startswith("@") and SpeculativeConfig.parse(given).method == "none":  # tune may have chosen it
                logger.warning(
                    "%s contains plain decoding, which is always part of the comparison; it is ignored", part
                )
                continue
            name, full = _completed(given, draft_model, num_draft_tokens)
            found.setdefault(name, _forced(full) if is_forced else full)
    if not found:
        raise ConfigError(f"--methods is {text!r}; give names of methods separated by commas, or {ALL}")
    return found


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas outside braces, brackets and quotes: ``a,{"b": 1, "c": [2, 3]}`` has two parts."""
    parts, depth, is_quoted = [""], 0, False
    for place, sign in enumerate(text):
        if sign == '"' and text[place - 1 : place] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0 and not is_quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _read(part: str) -> dict[str, Any]:
    found = read_text(part)
    if not isinstance(found, dict):
        raise ConfigError(
            f"--methods contains {part!r}, which is not a JSON object; write the keys of a speculative config"
        )
    return found


def _completed(
    given: dict[str, Any], draft_model: str | None, num_draft_tokens: int | None
) -> tuple[str, dict[str, Any]]:
    """Return the name of a method, and its config completed by the drafter and the draft length."""
    config = SpeculativeConfig.parse(given)
    if config.method == "none":
        raise ConfigError("--methods contains plain decoding, which is always part of the comparison; leave it out")
    full = dict(given)
    if draft_model is not None and _takes(config, draft_model):
        full["model"] = draft_model
    if num_draft_tokens is not None:
        full.setdefault("num_speculative_tokens", num_draft_tokens)
    spelled = str(given["method"]) if "method" in given else str(config.method)
    others = {key: value for key, value in given.items() if key != "method"}
    return " ".join([spelled, *(f"{key}={value}" for key, value in others.items())]), full


def _forced(given: dict[str, Any]) -> dict[str, Any]:
    """Return a config with fixed draft lengths, if the governor would choose them."""
    config = SpeculativeConfig.parse(given)
    if config.method == "auto":
        raise ConfigError(
            "--forced turns the governor off, and method 'auto' chooses with it; leave out --forced, or give --methods "
            "the methods to measure"
        )
    return {**given, "length_policy": FIXED} if config.is_governed else given


def _takes(config: SpeculativeConfig, drafter: str) -> bool:
    """Return whether a config needs this drafter: heads need a head, other methods a model."""
    is_head = recognized(drafter) is not None
    open_parts = [
        part
        for part in config.parts
        if part.model is None and "model" in part.definition.keys and not part.definition.model_is_optional
    ]
    return any(part.definition.drafts_with_heads == is_head for part in open_parts)
