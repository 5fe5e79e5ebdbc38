"""A speculative config as people write it: JSON, a file of it, or the bare name of a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError


def read_text(text: str) -> Any:
    """JSON, the JSON in ``@file``, or the bare name of a method, as a mapping.

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
