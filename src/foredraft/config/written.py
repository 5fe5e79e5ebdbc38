"""Parsing of text from users: a speculative config as JSON, JSON file or method name, and comma-separated lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.folders import parsed_json

PROFILE_KEY = "speculative_config"
"""Key under which a profile of ``foredraft tune`` stores the chosen config."""


def read_text(text: str) -> Any:
    """Parse JSON, the JSON in ``@file``, or the bare name of a method, which becomes a mapping.

    A profile of ``foredraft tune`` yields the config that it chose.

    Raises: ConfigError for a file that cannot be read, text that is not JSON, and a path in the place of a method.
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
        raise ConfigError(f'{source} is empty; write for example {{"method": "ngram"}}, or None for plain decoding')
    if text[0] not in '{["0123456789':
        _check_is_no_path(text)
        return {"method": text}
    try:
        found = parsed_json(text)
    except ValueError as error:
        raise ConfigError(f'{source} is not valid JSON: {error}; write for example {{"method": "ngram"}}') from None
    is_profile = isinstance(found, dict) and PROFILE_KEY in found and "facts" in found
    return found[PROFILE_KEY] if is_profile else found


def by_comma(text: str) -> list[str]:
    """Split at commas: ``a, b`` becomes "a" and "b"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def tuned(profile_file: str) -> dict[str, Any] | None:
    """Return the speculative config in a profile; None if it has none (such as profiles of ``tune profile``)."""
    try:
        chosen = parsed_json(Path(profile_file).expanduser().read_text(encoding="utf-8"))[PROFILE_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the loader of the profile reports what is wrong with it
    return chosen if isinstance(chosen, dict) else None


def _check_is_no_path(text: str) -> None:
    """Raise ConfigError if the text is a path; the message explains how to give a file or a model."""
    if text.endswith(".json"):
        raise ConfigError(f"speculative config {text!r} is neither a method nor JSON; to read a file, write '@{text}'")
    if "/" in text or text.startswith("zoo:") or text.endswith(".gguf"):
        raise ConfigError(
            f"speculative config {text!r} is neither a method nor JSON; to draft with that model, write "
            f'{{"method": "draft_model", "model": "{text}"}}'
        )
