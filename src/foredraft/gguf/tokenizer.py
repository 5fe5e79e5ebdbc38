"""Construction of the tokenizer that a GGUF file describes, from its metadata alone and thus the same on every version
of `transformers`.

A GGUF file has no ``tokenizer.json``. It contains tokens, merges or scores, the ids of special tokens, a chat template
and the name of a rule for splitting text before merging (``tokenizer.ggml.pre``). The rules below are those of the
tokenizers of the models that the names refer to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.errors import CheckpointError, ForedraftError, UnsupportedModelError, is_panic
from foredraft.gguf.header import Header
from foredraft.gguf.metadata import check_merges, check_tokenizer

logger = logging.getLogger("foredraft")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_MERGED = (0, _NORMAL)  # types that merges lead to; 0 is unknown
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL


def _cased(ending: str, digits: str) -> str:
    """Return a split pattern in which words end before capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*")]
    return "|".join([*words, digits]) + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)


_SPLITS = {
    _LLAMA3: ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
    _QWEN2: ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
    _cased("", r"\p{N}"): ("tekken",),
    _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"): ("gpt-4o", "llama4"),
}
_SPLIT_OF = {name: split for split, names in _SPLITS.items() for name in names}
_GPT2 = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "phi-2", "roberta-bpe", "jina-es", "jina-de"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"})
"""Split rules whose vocabularies keep a word whole if it is a token, regardless of merges."""


def read_tokenizer(header: Header) -> PreTrainedTokenizerBase | None:
    """Build the tokenizer of a file, with its special tokens and chat template; None if the file has none.

    Raises: UnsupportedModelError for an unsupported kind of tokenizer; CheckpointError for a damaged one.
    """
    entries = {
        key.removeprefix("tokenizer."): value for key, value in header.metadata.items() if key.startswith("tokenizer.")
    }
    kind = entries.get("ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    tokens = entries.get("ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{header.path} names a tokenizer ({kind}) but contains no tokens; download it again")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{header.path} has a tokenizer of the kind {kind!r} for {header.architecture!r}, which foredraft cannot "
            "read from GGUF; give the tokenizer of the original model: tokenizer=DIRECTORY or a hub id"
        )
    check_tokenizer(header)
    try:
        backend = (_byte_level if kind == "gpt2" else _sentencepiece)(tokens, entries, header)
        _add_tokens(backend, tokens, entries)
        return _wrap(backend, tokens, entries)
    except ForedraftError:
        raise
    except BaseException as error:  # tokenizers raises plain exceptions, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        check_merges(header)
        raise CheckpointError(
            f"the tokenizer in {header.path} cannot be built ({' '.join(str(error).split())[:200]}): the file is "
            "damaged. Download it again, or give the tokenizer of the original model: tokenizer=DIRECTORY or a hub id"
        ) from error


def _byte_level(tokens: Sequence[str], entries: Mapping[str, Any], header: Header) -> Tokenizer:
    """Build a byte-level BPE tokenizer, as of GPT-2, Llama 3, Qwen and their descendants."""
    name = str(entries.get("ggml.pre", "default"))
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SPLIT_OF:
        by_pattern = pre_tokenizers.Split(Regex(_SPLIT_OF[name]), behavior="isolated")
        split = pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif name in _SINGLE_DIGITS:
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    elif name not in _GPT2:
        logger.warning(
            "%s splits text by a rule called %r, which foredraft does not know, so the rule of GPT-2 is used. Text may "
            "become tokens that the model was not trained on. Give the original tokenizer to avoid that.",
            header.path,
            name,
        )
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    bpe = models.BPE(vocab, _merges(entries, header), ignore_merges=name in _WHOLE_WORDS_FIRST)
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _sentencepiece(tokens: Sequence[str], entries: Mapping[str, Any], header: Header) -> Tokenizer:
    """Build a character-level BPE tokenizer with byte fallback, as of Llama 2, Mistral, Gemma and their descendants."""
    scores = entries.get("ggml.scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if "ggml.merges" in entries:
        merges = _merges(entries, header)
    elif isinstance(scores, list) and len(scores) == len(tokens):
        types = entries.get("ggml.token_type") or [_NORMAL] * len(tokens)
        merges = merges_by_score({token: vocab[token] for token in vocab if types[vocab[token]] in _MERGED}, scores)
    else:
        raise CheckpointError(f"{header.path} contains neither merges nor a score per token; convert the model again")
    unknown = _token(tokens, entries.get("ggml.unknown_token_id"))
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if entries.get("ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend


def merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that a sentencepiece vocabulary implies: pairs that form a token, best token first.

    Example:
        >>> merges_by_score({"a": 0, "b": 1, "ab": 2, "aba": 3}, [0.0, 0.0, -2.0, -1.0])
        [('ab', 'a'), ('a', 'b')]
    """
    found = []
    for token, token_id in vocab.items():
        rank, length = -scores[token_id], len(token)
        for place in range(1, length):
            left = token[:place]
            if left in vocab and (right := token[place:]) in vocab:
                found.append((rank, -place, place - length, left, right))
    found.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in found]


def _merges(entries: Mapping[str, Any], header: Header) -> list[tuple[str, str]]:
    lines = entries.get("ggml.merges")
    if not isinstance(lines, list):
        raise CheckpointError(f"{header.path} contains no merges for its tokens; convert the model again")
    merges = [line.partition(" ")[::2] for line in lines]
    if not all(map(itemgetter(1), merges)):
        raise CheckpointError(f"{header.path} contains a merge that is not two tokens; download it again")
    return merges


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], entries: Mapping[str, Any]) -> None:
    """Add the tokens that are never split or merged: control tokens, and tokens added by the model's authors."""
    types = entries.get("ggml.token_type") or []
    kinds = [(token, kind) for token, kind in zip(tokens, types, strict=bool(types)) if kind != _NORMAL]
    control = [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == _CONTROL]
    added = [AddedToken(token, normalized=False, special=False) for token, kind in kinds if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(added)


def _wrap(backend: Tokenizer, tokens: Sequence[str], entries: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Wrap the backend as a tokenizer of `transformers`."""
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{ours}_token": _token(tokens, entries.get(f"ggml.{theirs}_token_id")) for ours, theirs in ids.items()}
    begins = entries.get("ggml.add_bos_token", entries["ggml.model"] == "llama" or _is_llama3(entries))
    ends = entries.get("ggml.add_eos_token", False)
    first = special["bos_token"] if begins else None
    last = special["eos_token"] if ends else None
    if first is not None or last is not None:
        known = [(token, tokens.index(token)) for token in (first, last) if token is not None]
        single, second = ([*([first] if first else []), text, *([last] if last else [])] for text in ("$A", "$B"))
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, *second], special_tokens=known
        )
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=_Kept(backend),
        chat_template=entries.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    return tokenizer


class _Kept:
    """A backend that is not copied. transformers copies the one given, which takes seconds for a large vocabulary."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self.backend


def _is_llama3(entries: Mapping[str, Any]) -> bool:
    return entries.get("ggml.pre") in ("llama3", "llama-v3", "llama-bpe")


def _token(tokens: Sequence[str], token_id: int | None) -> str | None:
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None
