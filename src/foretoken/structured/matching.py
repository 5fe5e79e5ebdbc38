"""One output and its grammar: which tokens may follow it, and what follows for certain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from foretoken.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from foretoken.tree import DraftTree


class Matching:
    """What a grammar says after the committed output of a row, and after paths of its drafts.

    Every path has a matcher of its own, a copy of its parent's with one token more (some microseconds), and that of the
    accepted path becomes the output's. No matcher ever goes back: those of llguidance 1.9 answer then with masks of the
    path that they left (`ParserState::rollback` keeps its ``bias_cache``). EOS is no token of the grammar: it may come
    where the grammar may end, and nothing but EOS comes after it.

    Args:
      matcher: of the grammar, to which no token was given yet.
      eos_token_ids: of the model.
      vocab_size: V of the model.

    Attributes:
      fault: what ended it: a limit of the grammar's cost, or an output that does not match. Nothing is allowed then.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: Seq[int], vocab_size: int) -> None:
        self.fault: GrammarError | None = None
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._matchers: dict[tuple[int, ...], LLMatcher | None] = {(): matcher}  # after paths; None: does not match
        self._has_ended = False  # what is committed ends with EOS
        self._bits: dict[tuple[int, ...], np.ndarray] = {}  # masks after paths

    def copy(self) -> Matching:
        """Another row after the same output."""
        other = Matching(self._committed.deep_copy(), tuple(self._eos), self._vocab_size)
        other._has_ended, other.fault = self._has_ended, self.fault
        return other

    @property
    def _committed(self) -> LLMatcher:
        matcher = self._matchers[()]
        assert matcher is not None
        return matcher

    def extend(self, tokens: Seq[int]) -> None:
        """Take in tokens of the output."""
        if self._has_ended or self.fault is not None:
            return
        text = self._before_eos(tokens)
        if (matcher := self._after(text)) is not None:
            self._matchers = {(): matcher}
            self._has_ended = len(text) < len(tokens)
        elif self.fault is None:
            self.fault = GrammarError("the output does not match its grammar")
        self._bits.clear()

    def allowed(self, path: Seq[int]) -> np.ndarray | None:
        """Bool (V,): the tokens that may follow the output and a path; None where there is a fault.

        Nothing may follow a path that does not match.
        """
        key = tuple(path)
        bits = self._bits.get(key)
        if bits is None and self.fault is None:
            bits = self._mask(key)
            self._bits[key] = bits
        if bits is None or self.fault is not None:
            return None
        return np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(bool)

    def _mask(self, path: tuple[int, ...]) -> np.ndarray:
        if self._has_ended or self._eos.intersection(path):
            only_eos = np.zeros(-(-self._vocab_size // 8) * 8, dtype=bool)
            only_eos[list(self._eos)] = True
            return np.packbits(only_eos, bitorder="little")
        matcher = self._after(path)
        if matcher is None:
            return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        self._works(matcher)
        return bits

    def legal(self, tree: DraftTree) -> DraftTree:
        """A draft without the nodes that do not match, and without what follows EOS."""
        if len(tree) == 1 or self.fault is not None:
            return tree
        kept, open_nodes = [0], [0]
        while open_nodes:
            parent = open_nodes.pop()
            path = tree.path_tokens(parent)
            if self._has_ended or self._eos.intersection(path) or (matcher := self._after(path)) is None:
                continue
            children = [node for node in tree.children[parent] if self._may_follow(matcher, tree.tokens[node])]
            kept += children
            open_nodes += reversed(children)
        return tree if len(kept) == len(tree) else tree.restricted(sorted(kept))

    def _may_follow(self, matcher: LLMatcher, token: int) -> bool:
        """Whether a token may come where a matcher is: one that is forced, or any that it would take."""
        if token in self._eos:
            return bool(matcher.is_accepting())
        forced = matcher.compute_ff_tokens()
        return token == forced[0] if forced else matcher.validate_tokens([token]) == 1

    def forced(self) -> tuple[int, ...]:
        """The tokens that follow the output for certain, EOS included; none where there is a choice."""
        if self._has_ended or self.fault is not None:
            return ()
        tokens = self._committed.compute_ff_tokens()
        if len(self._eos) == 1 and (end := self._after(tokens)) is not None and end.is_stopped():
            tokens = [*tokens, *self._eos]
        self._works(self._committed)
        return tuple(tokens)

    def _before_eos(self, tokens: Seq[int]) -> Seq[int]:
        """Tokens up to the first EOS, that left out."""
        end = next((place for place, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end]

    def _after(self, path: Seq[int]) -> LLMatcher | None:
        """The matcher after a path; None where that does not match."""
        key = tuple(path)
        known = next(length for length in range(len(key), -1, -1) if key[:length] in self._matchers)
        matcher = self._matchers[key[:known]]
        for length in range(known + 1, len(key) + 1):
            if matcher is None:
                return None
            matcher = self._with(matcher, key[length - 1])
            self._matchers[key[:length]] = matcher
        return matcher

    def _with(self, matcher: LLMatcher, token: int) -> LLMatcher | None:
        """A copy of a matcher that has taken one token more."""
        matcher = matcher.deep_copy()
        taken = matcher.try_consume_tokens([token])
        return matcher if self._works(matcher) and taken else None

    def _works(self, matcher: LLMatcher) -> bool:
        """Whether a matcher still works; else ``fault`` says why it does not."""
        if matcher.is_error():
            self.fault = GrammarError(f"the grammar gave up: {first_line(matcher.get_error())}")
        return self.fault is None


def first_line(message: str) -> str:
    """What a matcher says, without its state: the first line, and the error that a parser names further down."""
    lines = message.split("\n<state>")[0].strip().splitlines() or ["no reason is known"]
    named = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *named])[:300]
