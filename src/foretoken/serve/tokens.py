"""Tokens and their log-probabilities in the shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from foretoken.config.keywords import check_unicode
from foretoken.engine.stopping import REPLACEMENT
from foretoken.serve.errors import ApiError

if TYPE_CHECKING:
    from foretoken.sessions.outputs import Logprob

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have; vLLM's."""

Table = Mapping[int, "Logprob"]


def encode(tokenizer: Any, text: str, add_special_tokens: bool, name: str = "prompt") -> list[int]:
    """Token ids of a text.

    Raises: PromptError for half a surrogate pair.
    """
    check_unicode(text, name)
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


class TokenNames:
    """Texts of single tokens, and their bytes.

    Args:
      by_id: name tokens by their ids, ``token_id:5``, since several may have the same text.
    """

    def __init__(self, tokenizer: Any, by_id: bool = False) -> None:
        self._tokenizer, self._by_id = tokenizer, by_id

    def text(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self._by_id else self.plain(token, entry)

    def alone(self, token: int) -> str:
        """Of a token that has no log-probability."""
        return f"token_id:{token}" if self._by_id or self._tokenizer is None else str(self._tokenizer.decode([token]))

    def plain(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token

    def bytes(self, token: int, entry: Logprob) -> list[int] | None:
        """Bytes of a token, also of one that holds part of a character; None where the tokenizer does not tell."""
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
    """How byte-level tokenizers spell bytes: printable ones as themselves, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def number(logprob: float) -> float:
    return max(logprob, LOWEST)


def prompt_tables(tables: Sequence[Table | None] | None) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` of vLLM: by token id, with rank and text; None of the first token, which follows none."""
    if tables is None:
        return None
    return [None if table is None else {str(token): _entry(one) for token, one in table.items()} for table in tables]


def _entry(entry: Logprob) -> dict[str, Any]:
    return {"logprob": number(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}


def echoed_logprobs(
    names: TokenNames, ids: Sequence[int], first: str, tables: Sequence[Table | None], most: int
) -> dict[str, Any]:
    """``logprobs`` of a prompt, as completions have them.

    Args:
      first: text of the first token, which has no log-probability.
    """
    rest = [table for table in tables if table is not None]
    pieces = [table[token].decoded_token or "" for token, table in zip(ids[1:], rest, strict=True)]
    found = completion_logprobs(names, ids[1:], rest, pieces, len(first), most)
    before = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [before[name], *found[name]] for name in found}


def completion_logprobs(
    names: TokenNames, ids: Sequence[int], tables: Sequence[Table], pieces: Sequence[str], start: int, most: int
) -> dict[str, Any]:
    """``logprobs`` of completions.

    Args:
      pieces: text that each token has brought.
      start: where the text of the first one begins.
      most: most likely tokens that were asked for.
    """
    offsets = []
    for piece in pieces:
        offsets.append(start)
        start += len(piece)
    return {
        "tokens": [names.text(token, table[token]) for token, table in zip(ids, tables, strict=True)],
        "token_logprobs": [number(table[token].logprob) for token, table in zip(ids, tables, strict=True)],
        "top_logprobs": [_tops(names, table, most) for table in tables],
        "text_offset": offsets,
    }


def _tops(names: TokenNames, table: Table, most: int) -> dict[str, float]:
    """By text; of two tokens with one text, the likelier."""
    found: dict[str, float] = {}
    for token, entry in table.items():
        text = names.text(token, entry)
        found[text] = max(found.get(text, LOWEST), number(entry.logprob))
    return found if most else {}


def chat_logprobs(names: TokenNames, ids: Sequence[int], tables: Sequence[Table], most: int) -> dict[str, Any]:
    """``logprobs`` of chat."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        return {
            "token": names.text(token, found),
            "logprob": number(found.logprob),
            "bytes": names.bytes(token, found),
        }

    content = []
    for token, table in zip(ids, tables, strict=True):
        tops = sorted((found.rank, other) for other, found in table.items() if found.rank <= most)
        best = [entry(other, table[other]) for _, other in tops[:most]]
        content.append({**entry(token, table[token]), "top_logprobs": best})
    return {"content": content, "refusal": None}


def token_ids(value: Any, vocab_size: int, name: str) -> list[int]:
    """Raises: ApiError for what is not a list of token ids of this vocabulary."""
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < vocab_size for token in value):
        raise ApiError(400, f"{name} must be a list of token ids between 0 and {vocab_size - 1}", name)
    return value
