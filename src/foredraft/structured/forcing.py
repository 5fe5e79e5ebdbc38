"""Text that a grammar forces: found byte by byte, no further than a draft may need it, and written in tokens."""

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
"""Forced bytes that are looked at, beside two of the longest tokens that may come next."""
NUM_CHOPPED = 4
"""Tokens at the end of forced text that may be written otherwise, once it is known what follows (as in llguidance)."""
MOST_TEXTS = 4096
"""Forced texts whose tokens are kept."""
_NO_BYTE = 256


class Vocabulary:
    """The tokens of a model as bytes.

    Args:
      tokenizer: llguidance's, for the model's vocabulary.
      eos_token_ids: tokens that end an output; they are never part of forced text.
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
        """Tokens as bytes; None where one of them is no text."""
        texts = [self._bytes[token] for token in tokens]
        return b"".join(texts) if all(texts) else None

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """Bytes of each token."""
        return [len(self._bytes[token]) for token in tokens]

    def forced_byte(self, mask: bytes) -> tuple[int, int] | None:
        """The byte that all tokens of a mask begin with, and the length of the longest; None where they differ."""
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
        """Tokens of a text after a token, as the tokenizer writes both together where it keeps that token."""
        before = b"" if last is None else self._bytes[last]
        tokens = self.tokenizer.tokenize_bytes(before + text)
        if before:
            tokens = tokens[1:] if tokens[0] == last else self.tokenizer.tokenize_bytes(text)
        return tuple(tokens) if self.text(tokens) == text else ()  # some tokenizers change what they read


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Forced text after a place.

    Attributes:
      text: its bytes, as far as they were looked at.
      longest: bytes of the longest token that may come at each of them.
      matcher: at their end.
      mask: at their end, where it is known.
      is_closed: whether no more can be found out.
    """

    text: bytes
    longest: tuple[int, ...]
    matcher: LLMatcher
    mask: bytes | None = None
    is_closed: bool = False

    def after(self, text: bytes) -> Run | None:
        """The rest after its first bytes; None where there are others, or nothing is known."""
        if not self.text.startswith(text):
            return None
        return Run(self.text[len(text) :], self.longest[len(text) :], self.matcher, self.mask, self.is_closed)

    def lengthened(self, vocabulary: Vocabulary) -> Run:
        """The run with all bytes of its window, computed by one mask for each new byte."""
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
        """Tokens of the run, without those at its end that depend on what follows."""
        tokens = vocabulary.tokens(last, self.text)
        lengths = vocabulary.lengths(tokens)
        start = len(self.text) - sum(lengths[-NUM_CHOPPED:])
        end = next((at for at in range(start, len(self.text)) if at + self.longest[at] > len(self.text)), None)
        if end is None:
            return tokens
        kept = sum(stop <= end for stop in accumulate(lengths))
        return tokens[:kept]


def _window(longest: Sequence[int]) -> int:
    """Forced bytes that are looked at, by the longest token that may come first."""
    return LEAST_WINDOW + 2 * longest[0]


class Place:
    """An output, or a path of a draft after it: its matcher, and what is known of what may follow.

    Every place has a matcher of its own, a copy of an earlier one with tokens more. No matcher ever goes back: those of
    llguidance 1.9 answer then with masks of the path that they left (`ParserState::rollback` keeps its
    ``bias_cache``).

    Args:
      vocabulary: tokens of the model; None where no text is forced in tokens.
      matcher: here.
      last: the token before; None where there is none.
      run: forced text from here, as far as it is known.
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
        """The same place, with a matcher of its own."""
        return Place(self._vocabulary, self.matcher.deep_copy(), self.last, self._run)

    def after(self, tokens: Sequence[int]) -> Place | None:
        """The place after tokens; None where they do not match."""
        matcher = self.matcher.deep_copy()
        if matcher.try_consume_tokens([*tokens]) < len(tokens) or matcher.is_error():
            return None
        text = None if self._vocabulary is None or self._run is None else self._vocabulary.text(tokens)
        run = None if text is None or self._run is None else self._run.after(text)
        return Place(self._vocabulary, matcher, tokens[-1] if tokens else self.last, run)

    def mask(self) -> bytes:
        """Bits of the tokens that may follow, however forced text is written. The matcher may give up meanwhile."""
        if self._mask is None:
            self._mask = self.matcher.compute_bitmask()
        return self._mask

    def forced(self) -> tuple[int, ...]:
        """Tokens of the forced text from here, as far as it was looked at; the first of them is the only one allowed.

        It depends on the text so far and its last token alone, whether they were drafted or not.
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
