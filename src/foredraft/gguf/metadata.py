"""Checks of the metadata of a GGUF file. Every entry that a model or a tokenizer needs must have the right type and
range, and must be present if a reader would otherwise assume another value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.gguf.header import Header

_NOWHERE = 2**32 - 1
"""Token id that llama.cpp writes for a token that does not exist."""
_ENDS = ("eos", "eot", "eom")
_SPECIAL = (*_ENDS, "bos", "unknown", "padding", "seperator", "cls", "mask")  # the specification spells it so
_MAY_BE_NOWHERE = frozenset(_SPECIAL) - {*_ENDS, "bos"}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
_KINDS = range(7)  # token types: undefined, normal, unknown, control, user defined, unused, byte


def check_metadata(header: Header) -> None:
    """Raise CheckpointError for the first entry that is missing, of a wrong type, or out of range."""
    name = header.architecture
    if any(".attn_" in tensor.name for tensor in header.tensors):
        for key in ("context_length", "embedding_length", "block_count", "attention.head_count"):
            _need(header, f"{name}.{key}")
        _need(header, f"{name}.attention.layer_norm_rms_epsilon", f"{name}.attention.layer_norm_epsilon")
        for key in ("context_length", "embedding_length", "block_count", "vocab_size", "rope.dimension_count"):
            _check(header, f"{name}.{key}", _is_count, "a whole number above 0")
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            _check(header, f"{name}.{key}", _is_count_of_layers, "a whole number above 0, or one for each layer")
        for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base"):
            _check(header, f"{name}.{key}", _is_positive, "a finite number above 0")
    for key in ("attention.key_length", "attention.value_length", "expert_count", "expert_used_count"):
        _check(header, f"{name}.{key}", _is_whole, "a whole number")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        _check(header, f"{name}.{key}", _is_whole, "a whole number")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        _check(header, f"{name}.{key}", _is_finite, "a finite number")
    _check(header, f"{name}.rope.scaling.type", _is_text, "a name")
    _check_vocabulary(header)


def _check_vocabulary(header: Header) -> None:
    """Check the number of tokens, and the tokens that end text. Both matter even with another tokenizer."""
    found = header.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(found) if isinstance(found, list) else 0
    rows = next((tensor.shape[0] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0)
    if 0 < rows < num_tokens:
        wanted = f"token_embd.weight has {rows} rows"
        raise _damaged(header, "tokenizer.ggml.tokens", f"is a list of {num_tokens}", wanted)
    if size := num_tokens or rows:
        _check_ids(header, _ENDS, size)


def check_tokenizer(header: Header) -> None:
    """Check the entries that a tokenizer is built from.

    Raises: the errors of `check_metadata`.
    """
    name = "tokenizer.ggml"
    tokens: Sequence[Any] = header.metadata["tokenizer.ggml.tokens"]
    if set(map(type, tokens)) != {str}:
        odd = next(token for token in tokens if not isinstance(token, str))
        raise _damaged(header, f"{name}.tokens", f"contains {odd!r}", "tokens are text")
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise _damaged(header, f"{name}.tokens", f"contains {twice!r} twice", "each token has one id")
    size = len(tokens)
    _check(header, f"{name}.token_type", _is_list_of(size, {int}, _is_kind), f"{size} kinds of tokens, from 0 to 6")
    _check(header, f"{name}.scores", _is_list_of(size, {int, float}, math.isfinite), f"{size} finite numbers")
    _check(header, f"{name}.merges", _is_list_of(None, {str}), "a list of text")
    _check(header, f"{name}.pre", _is_text, "a name")
    for key in _FLAGS:
        _check(header, f"{name}.{key}", lambda value: isinstance(value, bool), "true or false")
    _check(header, "tokenizer.chat_template", _is_text, "text")
    _check_ids(header, _SPECIAL, size)


def check_merges(header: Header) -> None:
    """Check that merges join tokens into tokens. Building a BPE fails otherwise, without saying where.

    Raises: CheckpointError.
    """
    known, merges = set(header.metadata["tokenizer.ggml.tokens"]), header.metadata.get("tokenizer.ggml.merges", ())
    for left, right in (line.split(" ", 1) for line in merges):
        for token in (left, right, left + right):
            if token not in known:
                found, wanted = f"joins {left[:40]!r} and {right[:40]!r}", f"{token[:80]!r} is not among its tokens"
                raise _damaged(header, "tokenizer.ggml.merges", found, wanted)


def _need(header: Header, *keys: str) -> None:
    """Check that at least one of the entries is present."""
    if not any(key in header.metadata for key in keys):
        raise CheckpointError(
            f"{header.path} has no {' or '.join(keys)} in its metadata, and another value would be assumed: it is "
            "damaged or incomplete; download or convert the model again"
        )


def _check(header: Header, key: str, is_right: Callable[[Any], bool], wanted: str) -> None:
    """Check the value of an entry, if it is present."""
    value = header.metadata.get(key)
    if value is not None and not is_right(value):
        raise _damaged(header, key, f"is {_short(value)}", f"it should be {wanted}")


def _damaged(header: Header, key: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{header.path} is damaged in its metadata: {key} {found}, but {wanted}; download or convert the model again"
    )


def _check_ids(header: Header, names: Sequence[str], size: int) -> None:
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        value = header.metadata.get(key)
        if value == _NOWHERE and name in _MAY_BE_NOWHERE:
            continue
        if value is not None and not (_is_whole(value) and value < size):
            raise _damaged(header, key, f"is {_short(value)}", f"tokens have ids from 0 to {size - 1}")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)} ({', '.join(repr(each)[:20] for each in value[:3])}, ...)"
    return repr(value)[:80]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_count_of_layers(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and bool(value) and all(map(_is_whole, value)) and any(value))


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and value > 0


def _is_kind(value: int) -> bool:
    return value in _KINDS


def _is_list_of(
    size: int | None, types: set[type], is_right: Callable[[Any], bool] | None = None
) -> Callable[[Any], bool]:
    """Return a check of a list whose elements have one of some types. Equal elements are checked once."""

    def check(value: Any) -> bool:
        if not isinstance(value, list) or size not in (None, len(value)):
            return False
        return set(map(type, value)) <= types and (is_right is None or all(map(is_right, set(value))))

    return check
