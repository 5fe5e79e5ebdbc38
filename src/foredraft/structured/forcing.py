"""Text that a grammar forces: found byte by byte, only as far as a draft may need it, and converted to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEAST_WINDOW = 16
"""Number of forced bytes that are computed, in addition to twice the length of the longest possible next token."""
NUM_CHOPPED = 4
"""Number of tokens at the end of forced text whose tokenization may change with the following text (as in llguidance).
"""
MOST_TEXTS = 4096
"""Number of forced texts whose tokens are cached."""
_NO_BYTE = 256


class Vocabulary:
    """The tokens of a model as bytes.

    Args:
      tokenizer: llguidance's tokenizer for the model's vocabulary.
      eos_token_ids: tokens that end an output. They are never part of forced text.
    """

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        size = -(-tokenizer.vocab_size // 32) * 32  # masks are words of 32 tokens
        first, length = np.full(size, _NO_BYTE, dtype=np.int16), np.zeros(size, dtype=np.int32)
        self.token_of: dict[int, int] = {}
        self._bytes: list[bytes] = []
        for token in range(tokenizer.vocab_size):
            text = b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            self._bytes.append(text)
            if text and token not in eos_token_ids:
                first[token], length[token] = text[0], len(text)
                if len(text) == 1:
                    self.token_of.setdefault(text[0], token)
        self._first, self._length = first.reshape(-1, 32), length.reshape(-1, 32)
        self.tokens = lru_cache(MOST_TEXTS)(self._tokens)

    def text(self, tokens: Sequence[int]) -> bytes | None:
        """Return tokens as bytes; None if one of them has no text."""
        texts = [self._bytes[token] for token in tokens]
        return b"".join(texts) if all(texts) else None

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """Return the number of bytes of each token."""
        return [len(self._bytes[token]) for token in tokens]

    def forced_byte(self, mask: bytes) -> tuple[int, int] | None:
        """Return the first byte that all tokens of a mask share, and the length of the longest token; None if they
        differ."""
        words = np.frombuffer(mask, dtype=np.uint32)
        held = np.flatnonzero(words)
        if not len(held):
            return None
        lowest, highest = int(words[held[0]]), int(words[held[-1]])
        byte = int(self._first[held[0], (lowest & -lowest).bit_length() - 1])
        if byte == _NO_BYTE or byte != self._first[held[-1], highest.bit_length() - 1]:
            return None
        is_set = np.unpackbits(words[held].view(np.uint8), bitorder="little").view(bool).reshape(-1, 32)
        if (self._first[held][is_set] != byte).any():
            return None
        return byte, int(self._length[held][is_set].max())

    def _tokens(self, last: int | None, text: bytes) -> tuple[int, ...]:
        """Tokenize a text after a token. Both texts are tokenized together if the result keeps that token."""
        before = b"" if last is None else self._bytes[last]
        tokens = self.tokenizer.tokenize_bytes(before + text)
        if before:
            tokens = tokens[1:] if tokens[0] == last else self.tokenizer.tokenize_bytes(text)
        return tuple(tokens) if self.text(tokens) == text else ()  # some tokenizers change their input


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Forced text after a place.

    Attributes:
      text: bytes of the forced text that have been computed.
      longest: at each byte of ``text``, the length of the longest token that can start there, in bytes.
      matcher: matcher at the end of ``text``.
      mask: mask at the end of ``text``, if it was computed.
      is_closed: True if no more forced bytes can be found.
    """

    text: bytes
    longest: tuple[int, ...]
    matcher: LLMatcher
    mask: bytes | None = None
    is_closed: bool = False

    def after(self, text: bytes) -> Run | None:
        """Return the run after its first bytes ``text``; None if it begins differently, or if so much is not computed
        yet."""
        if not self.text.startswith(text):
            return None
        return Run(self.text[len(text) :], self.longest[len(text) :], self.matcher, self.mask, self.is_closed)

    def lengthened(self, vocabulary: Vocabulary) -> Run:
        """Return the run extended to its whole window, with one mask computed for each new byte."""
        if self.is_closed or (self.longest and len(self.text) >= _window(self.longest)):
            return self
        text, longest = bytearray(self.text), [*self.longest]
        matcher, mask = self.matcher.deep_copy(), self.mask
        while not longest or len(text) < _window(longest):
            mask = matcher.compute_bitmask() if mask is None else mask
            if matcher.is_error():
                return Run(bytes(text), tuple(longest), matcher, is_closed=True)
            forced = vocabulary.forced_byte(mask)
            token = None if forced is None else vocabulary.token_of.get(forced[0])
            if forced is None or token is None or not matcher.try_consume_tokens([token]):
                return Run(bytes(text), tuple(longest), matcher, mask, is_closed=True)
            text.append(forced[0])
            longest.append(forced[1])
            mask = None
        return Run(bytes(text), tuple(longest), matcher)

    def tokens(self, vocabulary: Vocabulary, last: int | None) -> tuple[int, ...]:
        """Return the tokens of the run, without those at its end that depend on the following text."""
        tokens = vocabulary.tokens(last, self.text)
        lengths = vocabulary.lengths(tokens)
        start = len(self.text) - sum(lengths[-NUM_CHOPPED:])
        end = next((at for at in range(start, len(self.text)) if at + self.longest[at] > len(self.text)), None)
        if end is None:
            return tokens
        kept = sum(stop <= end for stop in accumulate(lengths))
        return tokens[:kept]


def _window(longest: Sequence[int]) -> int:
    """Number of forced bytes to compute: more where the vocabulary has a longer token that can start the forced text.

    Args:
      longest: at each byte of the forced text, the length of the longest token that can start there, in bytes.
    """
    return LEAST_WINDOW + 2 * longest[0]


class Place:
    """The state after an output, or after a path of a draft that follows the output. It contains the matcher and the
    computed part of the forced text.

    Every place has its own matcher, a copy of an earlier one advanced by some tokens. A matcher is never rolled back,
    because after a rollback llguidance 1.9 returns masks of the abandoned path (`ParserState::rollback` keeps its
    ``bias_cache``).

    Args:
      vocabulary: tokens of the model; None if no forced tokens are computed.
      matcher: matcher at this place.
      last: the token before; None at the start.
      run: forced text from this place on, as far as it is known.
    """

    __slots__ = ("_forced", "_mask", "_run", "_vocabulary", "last", "matcher")

    def __init__(
        self, vocabulary: Vocabulary | None, matcher: LLMatcher, last: int | None = None, run: Run | None = None
    ) -> None:
        self.matcher, self.last = matcher, last
        self._vocabulary, self._run = vocabulary, run
        self._mask = run.mask if run is not None and not run.text else None
        self._forced: tuple[int, ...] | None = None

    def copy(self) -> Place:
        """Return the same place with its own matcher."""
        return Place(self._vocabulary, self.matcher.deep_copy(), self.last, self._run)

    def after(self, tokens: Sequence[int]) -> Place | None:
        """Return the place after tokens; None if they do not match."""
        matcher = self.matcher.deep_copy()
        if matcher.try_consume_tokens([*tokens]) < len(tokens) or matcher.is_error():
            return None
        text = None if self._vocabulary is None or self._run is None else self._vocabulary.text(tokens)
        run = None if text is None or self._run is None else self._run.after(text)
        return Place(self._vocabulary, matcher, tokens[-1] if tokens else self.last, run)

    def mask(self) -> bytes:
        """Return the bits of the tokens that may follow, regardless of forced text.

        Computing it may put the matcher into error.
        """
        if self._mask is None:
            self._mask = self.matcher.compute_bitmask()
        return self._mask

    def forced(self) -> tuple[int, ...]:
        """Return the tokens of the computed part of the forced text. The first of them is the only allowed token.

        Forced tokens depend only on the text before them and its last token, whether drafted or not.
        """
        if self._forced is None:
            self._forced = self._new_forced()
        return self._forced

    def _new_forced(self) -> tuple[int, ...]:
        vocabulary = self._vocabulary
        if vocabulary is None or self.matcher.is_stopped():
            return ()
        run = self._run
        if run is None or not (run.text or run.is_closed):
            mask = self.mask()
            if self.matcher.is_error():
                return ()
            run = Run(b"", (), self.matcher, mask)
        self._run = run.lengthened(vocabulary)
        return self._run.tokens(vocabulary, self.last) if self._run.text else ()
