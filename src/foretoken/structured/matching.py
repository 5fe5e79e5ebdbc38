"""One output and its grammar: which tokens may follow it, and what follows for certain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from foretoken.beginnings import shared_length
from foretoken.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from foretoken.tree import DraftTree


class Matching:
    """What a grammar says after the committed output of a row, and after paths of its drafts.

    The matcher goes to a path from where it is: back to what both have in common, then on. So nodes that are asked for
    depth first cost one token each, and only `extend` takes anything in for good. EOS is no token of the grammar: it
    may come where the grammar may end, and nothing but EOS comes after it.

    Args:
      matcher: of the grammar, to which no token was given yet.
      eos_token_ids: of the model.
      vocab_size: V of the model.

    Attributes:
      fault: what ended it: a limit of the grammar's cost, or an output that does not match. Nothing is allowed then.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: Seq[int], vocab_size: int) -> None:
        self.fault: GrammarError | None = None
        self._matcher = matcher
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._path: list[int] = []  # consumed beyond what is committed
        self._has_ended = False  # what is committed ends with EOS
        self._bits: dict[tuple[int, ...], np.ndarray] = {}  # masks after paths

    def copy(self) -> Matching:
        """Another row after the same output."""
        self._go(())
        other = Matching(self._matcher.deep_copy(), tuple(self._eos), self._vocab_size)
        other._has_ended, other.fault = self._has_ended, self.fault
        return other

    def extend(self, tokens: Seq[int]) -> None:
        """Take in tokens of the output."""
        if self._has_ended or self.fault is not None:
            return
        text = self._before_eos(tokens)
        if self._go(text):
            self._has_ended = len(text) < len(tokens)
        elif self.fault is None:
            self.fault = GrammarError("the output does not match its grammar")
        self._path = []
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
        if not self._go(path):
            return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def legal(self, tree: DraftTree) -> DraftTree:
        """A draft without the nodes that do not match, and without what follows EOS."""
        if len(tree) == 1 or self.fault is not None:
            return tree
        kept, open_nodes = [0], [0]
        while open_nodes:
            parent = open_nodes.pop()
            path = tree.path_tokens(parent)
            if self._has_ended or self._eos.intersection(path) or not self._go(path):
                continue
            children = [node for node in tree.children[parent] if self._may_follow(tree.tokens[node])]
            kept += children
            open_nodes += reversed(children)
        return tree if len(kept) == len(tree) else tree.restricted(sorted(kept))

    def _may_follow(self, token: int) -> bool:
        """Whether a token may come where the matcher is: one that is forced, or any that it would take."""
        if token in self._eos:
            return bool(self._matcher.is_accepting())
        forced = self._matcher.compute_ff_tokens()
        return token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1

    def forced(self) -> tuple[int, ...]:
        """The tokens that follow the output for certain, EOS included; none where there is a choice."""
        if self._has_ended or self.fault is not None or not self._go(()):
            return ()
        tokens = self._matcher.compute_ff_tokens()
        if len(self._eos) == 1 and self._go(tokens) and self._matcher.is_stopped():
            tokens = [*tokens, *self._eos]
        self._check()
        return tuple(tokens)

    def _before_eos(self, tokens: Seq[int]) -> Seq[int]:
        """Tokens up to the first EOS, that left out."""
        end = next((place for place, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end]

    def _go(self, path: Seq[int]) -> bool:
        """Move the matcher behind a path; False where that does not match, and it is left within it."""
        path = list(path)
        common = shared_length(path, self._path)
        if len(self._path) > common:
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        rest = path[common:]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path += rest[:taken]
        return self._check() and taken == len(rest)

    def _check(self) -> bool:
        """Whether the matcher still works; else ``fault`` says why it does not."""
        if self._matcher.is_error():
            self.fault = GrammarError(f"the grammar gave up: {first_line(self._matcher.get_error())}")
        return self.fault is None


def first_line(message: str) -> str:
    """What a matcher says, without its state: the first line, and the error that a parser names further down."""
    lines = message.split("\n<state>")[0].strip().splitlines() or ["no reason is known"]
    named = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *named])[:300]
