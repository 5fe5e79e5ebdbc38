"""Prompt files for every command and for training: JSON lines, or one prompt per line of text."""

from __future__ import annotations

import io
import lzma
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.config.keywords import whole_number
from foredraft.errors import PromptError
from foredraft.folders import parsed_json

STDIN = "-"


@dataclass(frozen=True)
class PromptLine:
    """A prompt from one line of a file.

    Args:
      place: file name and line number, for messages.
      number: line number, from 1.
      text: text of the prompt; empty if it is given as token ids.
      token_ids: token ids of the prompt; None if it is given as text.
      keys: all keys of the line, such as ``category`` or ``answer``.
    """

    place: str
    number: int
    text: str
    token_ids: tuple[int, ...] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """Category of the prompt; "prompt" if the line has none."""
        return str(self.keys.get("category", "prompt"))

    @property
    def given(self) -> Any:
        """The prompt in the form of `LLM.generate`."""
        return self.text if self.token_ids is None else {"prompt_token_ids": list(self.token_ids)}


def read_prompts_file(file: str | os.PathLike[str]) -> list[PromptLine]:
    """Read the prompts of a JSONL file (keys ``turns``, ``prompt``, ``text`` or ``prompt_token_ids``), or one prompt
    per line of a .txt file.

    If a line has several turns, the first is the prompt. The name "-" reads JSONL from standard input, and a file whose
    name ends in .xz is decompressed. Files are UTF-8, with or without a byte order mark. Only line feeds and carriage
    returns end a line; U+2028, U+0085 and form feeds are text.

    Raises: PromptError.
    """
    name, path = str(file), Path(file).expanduser()
    called = "standard input" if name == STDIN else f"prompts file {name!r}"
    try:
        data = sys.stdin.buffer.read() if name == STDIN else path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{called} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x} ({error.reason}), so it "
            "cannot be read; convert it, for instance with iconv"
        ) from None
    except (OSError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"{called} cannot be read: {reason}; check the path, or copy it again") from None
    # str.splitlines also splits at form feeds, U+2028 and others; a text stream splits at line ends only
    lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]
    written = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".txt":
        return [PromptLine(f"{name}, line {number}", number, line) for number, line in written]
    return [_from_json(line, f"{name}, line {number}", number) for number, line in written]


def _from_json(line: str, place: str, number: int) -> PromptLine:
    try:
        entry = parsed_json(line)
    except ValueError as error:
        raise PromptError(f"{place} is not JSON: {error}; write one object per line, or name the file .txt") from None
    if isinstance(entry, str):
        entry = {"text": entry}
    if isinstance(entry, Mapping):
        turns = entry.get("turns")
        texts = [*(turns[:1] if isinstance(turns, list) else []), entry.get("prompt"), entry.get("text")]
        if (text := next((text for text in texts if isinstance(text, str)), None)) is not None:
            return PromptLine(place, number, text, keys=entry)
        if isinstance(entry.get("prompt_token_ids"), list):
            ids = tuple(_token_id(token, place) for token in entry["prompt_token_ids"])
            return PromptLine(place, number, "", ids, entry)
    raise PromptError(f"{place} contains no prompt; give turns (a list of texts), prompt, text or prompt_token_ids")


def _token_id(token: Any, place: str) -> int:
    try:
        number = whole_number(token)
    except TypeError:
        number = -1
    if number < 0:
        raise PromptError(f"{place} contains {token!r}; token ids are whole numbers, 0 or more")
    return number
