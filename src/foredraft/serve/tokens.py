"""Tokens and log-probabilities in the formats of the OpenAI API."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from foredraft.config.keywords import check_unicode
from foredraft.engine.frontend import Logprob
from foredraft.engine.stopping import REPLACEMENT, Detokenizer
from foredraft.serve.errors import ApiError

MOST = sys.maxsize
LOWEST = -9999.0
"""Value written in place of minus infinity, which JSON does not have, as in vLLM."""

Table = Mapping[int, "Logprob"]


def encode(tokenizer: Any, text: str, add_special_tokens: bool, name: str = "prompt") -> list[int]:
    """Tokenize text.

    Raises: PromptError for an unpaired surrogate.
    """
    check_unicode(text, name)
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def characters_per_token(tokenizer: Any) -> int | None:
    """Maximum number of text characters that one token can represent; None if there is no bound.

    Byte-level vocabularies can spell every byte and drop nothing, so the bound is the length of the longest token.
    Other tokenizers may drop spaces, merge characters, or have a single token for all unknown text.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    backend = tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=True)
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    is_whole = isinstance(backend.model, BPE) and backend.normalizer is None and backend.truncation is None
    if not is_whole or strips or not vocabulary.keys() >= _bytes_of_characters().keys():
        return None
    return max(map(len, vocabulary)) if _splits_bytes(backend.pre_tokenizer) else None


def _splits_bytes(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer is byte-level and drops nothing."""
    found = {} if pre_tokenizer is None else json.loads(pre_tokenizer.__getstate__())
    steps = found.get("pretokenizers", [found])
    kinds = [step.get("type") for step in steps]
    loses = any(step.get("behavior") == "Removed" for step in steps)
    return "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Split", "Digits"} and not loses


class TokenNames:
    """Text and bytes of single tokens.

    Args:
      by_id: whether tokens are named by id, such as ``token_id:5``, because several tokens may have the same text.
    """

    def __init__(self, tokenizer: Any, by_id: bool = False) -> None:
        self._tokenizer, self._by_id = tokenizer, by_id

    def text(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self._by_id else self.plain(token, entry)

    def alone(self, token: int) -> str:
        """Name of a token that has no log-probability."""
        return f"token_id:{token}" if self._by_id or self._tokenizer is None else str(self._tokenizer.decode([token]))

    def plain(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token

    def bytes(self, token: int, entry: Logprob) -> list[int] | None:
        """Bytes of a token, which may be a part of a character; None if they are unknown."""
        text = entry.decoded_token
        if text is None:
            return None
        if REPLACEMENT not in text:
            return list(text.encode("utf-8"))
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        table = _bytes_of_characters()
        return [table[one] for one in spelled] if spelled and all(one in table for one in spelled) else None


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Byte of each character in byte-level vocabularies. Printable bytes are their own characters; the others are
    written from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Offsets:
    """Character offsets of tokens in the text of a row.

    A character that is split over several tokens counts to the last of them, so all of them have its offset. A stop
    string counts as text, even if it is removed from the output later.

    Args:
      start: offset of the first token.
    """

    def __init__(self, tokenizer: Any, start: int = 0, *, skip_special_tokens: bool = True) -> None:
        self._start = start
        self._text = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def read(self, ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token in ids:
            offsets.append(self._start + (0 if self._text is None else len(self._text.text)))
            if self._text is not None:
                self._text.append(token)
        return offsets

    @classmethod
    def of_prompt(cls, tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
        """Offsets of the tokens of a prompt. Special tokens in front, which the prompt text does not contain, have
        offset 0."""
        offsets = cls(tokenizer, skip_special_tokens=False).read(ids)
        spelled = "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=False))
        surplus = len(spelled) - len(text) if spelled.endswith(text) else 0
        return [max(0, offset - surplus) for offset in offsets]


def number(logprob: float) -> float:
    return max(logprob, LOWEST)


def prompt_tables(tables: Sequence[Table | None] | None, most: int) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` in vLLM's format: a mapping from token id to log-probability, rank and text per token. The
    first token has None, because nothing precedes it."""
    if tables is None:
        return None
    return [
        None if table is None else {str(token): _entry(one) for token, one in _best(table, most)} for table in tables
    ]


def _best(table: Table, most: int) -> list[tuple[int, Logprob]]:
    """Entries of the token itself, which comes first, and of the most likely tokens. The table may contain more."""
    return [(token, entry) for place, (token, entry) in enumerate(table.items()) if not place or entry.rank <= most]


def _entry(entry: Logprob) -> dict[str, Any]:
    return {"logprob": number(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}


def echoed_logprobs(
    names: TokenNames, ids: Sequence[int], tables: Sequence[Table | None], offsets: Sequence[int], most: int
) -> dict[str, Any]:
    """``logprobs`` of an echoed prompt in the format of completions; the first token has none."""
    rest = [table for table in tables if table is not None]
    found = completion_logprobs(names, ids[1:], rest, offsets, most)
    first = {"tokens": [names.alone(ids[0])], "token_logprobs": [None], "top_logprobs": [None], "text_offset": []}
    return {name: first[name] + found[name] for name in found}


def completion_logprobs(
    names: TokenNames,
    ids: Sequence[int],
    tables: Sequence[Table],
    offsets: Sequence[int],
    most: int,
    is_named: bool = False,
) -> dict[str, Any]:
    """``logprobs`` in the format of completions.

    Args:
      offsets: offset of each token in the text.
      most, is_named: arguments of `chat_logprobs`.
    """
    return {
        "tokens": [names.text(token, table[token]) for token, table in zip(ids, tables, strict=True)],
        "token_logprobs": [number(table[token].logprob) for token, table in zip(ids, tables, strict=True)],
        "top_logprobs": [_tops(names, table, MOST if is_named else most) for table in tables],
        "text_offset": list(offsets),
    }


def _tops(names: TokenNames, table: Table, most: int) -> dict[str, float]:
    """Log-probabilities by token text; if two tokens have the same text, the higher value."""
    found: dict[str, float] = {}
    for token, entry in _best(table, most):
        text = names.text(token, entry)
        found[text] = max(found.get(text, LOWEST), number(entry.logprob))
    return found if most else {}


def chat_logprobs(
    names: TokenNames, ids: Sequence[int], tables: Sequence[Table], most: int, is_named: bool = False
) -> dict[str, Any]:
    """``logprobs`` in the format of chat.

    Args:
      most: number of top log-probabilities per token.
      is_named: whether the request selected tokens with ``logprob_token_ids``; then all entries of the tables are
        returned.
    """

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        return {
            "token": names.text(token, found),
            "logprob": number(found.logprob),
            "bytes": names.bytes(token, found),
        }

    content = []
    for token, table in zip(ids, tables, strict=True):
        tops = sorted((found.rank, other) for other, found in table.items() if found.rank <= most)[:most]
        shown = table if is_named else [other for _, other in tops]
        best = [entry(other, table[other]) for other in shown]
        content.append({**entry(token, table[token]), "top_logprobs": best})
    return {"content": content, "refusal": None}


def token_ids(value: Any, vocab_size: int, name: str) -> list[int]:
    """Return a field that must be a list of token ids.

    Raises: ApiError for any other value.
    """
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < vocab_size for token in value):
        raise ApiError(400, f"{name} must be a list of token ids between 0 and {vocab_size - 1}", name)
    return value
