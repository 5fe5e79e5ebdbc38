"""The methods that are compared, as a user names them."""

from __future__ import annotations

import logging
from typing import Any

from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.written import read_text
from foredraft.errors import ConfigError
from foredraft.methods import methods, recognized

logger = logging.getLogger("foredraft")

PLAIN = "plain"
ALL = "all"
COMPOSITIONS = ("suffix+draft_model", "ngram>token_recycling")
"""The combinations that "all" tries besides the single methods."""


def read_candidates(text: str, draft_model: str | None, num_draft_tokens: int | None) -> dict[str, dict[str, Any]]:
    """The methods that a user names: by comma, ``a+b``, ``a>b``, JSON and ``@FILE`` as everywhere, or "all".

    Args:
      draft_model: for those that draft with a model; a head for those that draft with heads.
      num_draft_tokens: for all; None leaves every method its default.

    Returns: speculative configs by their names in tables.
    Raises: ConfigError for anything that is not a method.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in split_outside_brackets(text):
        single = (name for name, method in methods().items() if name != "none" and not method.combines)
        names = [*single, *COMPOSITIONS]
        for given in [{"method": name} for name in names] if part == ALL else [_read(part)]:
            if part.startswith("@") and SpeculativeConfig.parse(given).method == "none":  # as tune may have chosen
                logger.warning("%s names plain decoding, which every method is compared with anyway", part)
                continue
            name, full = _completed(given, draft_model, num_draft_tokens)
            found.setdefault(name, full)
    if not found:
        raise ConfigError(f"--methods is {text!r}; name methods with commas between them, or {ALL}")
    return found


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that stand outside of braces, brackets and quotes: ``a,{"b": 1, "c": [2, 3]}`` has two parts."""
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
            f"--methods holds {part!r}, which is not a JSON object; write the keys of a speculative config"
        )
    return found


def _completed(
    given: dict[str, Any], draft_model: str | None, num_draft_tokens: int | None
) -> tuple[str, dict[str, Any]]:
    """A name, and the config with the drafter and the length that were named beside it."""
    config = SpeculativeConfig.parse(given)
    if config.method == "none":
        raise ConfigError("--methods holds plain decoding, which every method is compared with anyway; leave it out")
    full = dict(given)
    if draft_model is not None and _takes(config, draft_model):
        full["model"] = draft_model
    if num_draft_tokens is not None:
        full.setdefault("num_speculative_tokens", num_draft_tokens)
    spelled = str(given["method"]) if "method" in given else str(config.method)
    others = {key: value for key, value in given.items() if key != "method"}
    return " ".join([spelled, *(f"{key}={value}" for key, value in others.items())]), full


def _takes(config: SpeculativeConfig, drafter: str) -> bool:
    """Whether a config drafts with what was named beside it: heads with a head, other methods with a model."""
    is_head = recognized(drafter) is not None
    open_parts = [
        part
        for part in config.parts
        if part.model is None and "model" in part.definition.keys and not part.definition.model_is_optional
    ]
    return any(part.definition.drafts_with_heads == is_head for part in open_parts)
