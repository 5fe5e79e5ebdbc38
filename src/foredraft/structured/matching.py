"""Matcher of one output and its grammar: allowed and forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foredraft.errors import GrammarError
from foredraft.structured.forcing import Place, Vocabulary
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Compiled:
    """A compiled grammar. The matchers of a grammar share an automaton, and every mask may add states to it.

    When the automaton reaches its limit of states (``is_full``), none of its matchers works any more, whichever row
    added the states.

    Args:
      make: function that compiles the grammar and returns a matcher at its start.
      vocabulary: tokens of the model; None if the grammar forces no tokens.
    """

    def __init__(self, make: Callable[[], LLMatcher], vocabulary: Vocabulary | None = None) -> None:
        self.num_masks, self.is_full = 0, False
        self._make, self._matcher, self.vocabulary = make, make(), vocabulary

    def place(self) -> Place:
        """Return the place at the start of an output."""
        return Place(self.vocabulary, self._matcher.deep_copy())

    def anew(self) -> Compiled:
        """Compile the same grammar again, with its own automaton. Raises: GrammarError."""
        return Compiled(self._make, self.vocabulary)


MOST_GUESSES = 4
"""Maximum number of choices in one draft with a guessed outcome."""
NUM_BEFORE = 2
"""Number of tokens before a choice that, together with the allowed tokens, identify it."""
FULL = "too many states"
"""Text in llguidance's error when an automaton has reached its limit."""
MAX_STATES = 100_000
"""Maximum number of states of one automaton, some 64 MB."""


class Matching:
    """Allowed and forced tokens after the committed output of a row, and after paths of its drafts.

    Every path has its own place, and the place of the accepted path becomes the place of the output. EOS is not a token
    of the grammar. EOS may come where the grammar may end, and only EOS may follow it.

    If a shared automaton reaches its limit, the row continues with its own automaton, so that requests of others do not
    end an output.

    Args:
      compiled: the grammar.
      eos_token_ids: EOS tokens of the model.
      vocab_size: V of the model.

    Attributes:
      fault: the error that ended matching: a limit of the grammar's cost, or an output that does not match. No token is
        allowed after it.
    """

    def __init__(self, compiled: Compiled, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self.fault: GrammarError | None = None
        self._compiled, self._is_alone = compiled, False
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._places: dict[tuple[int, ...], Place | None] = {(): compiled.place()}  # by path; None: it does not match
        self._has_ended = False  # whether the committed output ends with EOS
        self._bits: dict[tuple[int, ...], np.ndarray | None] = {}  # masks by path; None: the matcher is in error
        self._text: list[int] = []  # committed tokens, without EOS
        self._chosen: dict[int, int] = {}  # by choice, its last outcome

    def copy(self) -> Matching:
        """Return the matcher of another row with the same output."""
        other = Matching(self._compiled, tuple(self._eos), self._vocab_size)
        other._places = {(): self._committed.copy()}
        other._has_ended, other.fault, other._text = self._has_ended, self.fault, self._text.copy()
        return other

    @property
    def _committed(self) -> Place:
        place = self._places[()]
        assert place is not None
        return place

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output."""
        if self._has_ended or self.fault is not None:
            return
        text = self._before_eos(tokens)
        self._learn(text)
        place = self._after(text)
        if place is None and self._goes_on_alone():  # a full automaton may reject tokens that match
            place = self._after(text)
        if place is not None:
            self._places = {(): place}
            self._has_ended = len(text) < len(tokens)
        else:
            self.fault = self._why_not(text)
        self._text += text
        self._bits.clear()

    def only(self, path: Sequence[int]) -> int | None:
        """Return the only token that may follow the output and a path, if the grammar forces one."""
        if self._has_ended or self.fault is not None or self._eos.intersection(path):
            return None
        place = self._after(path)
        forced = () if place is None or place.matcher.is_error() else place.forced()
        return forced[0] if forced else None

    def allowed(self, path: Sequence[int]) -> np.ndarray | None:
        """Return bool (V,): the tokens that may follow the output and a path; None if the matcher is in error.

        No token may follow a path that does not match.
        """
        bits = self._mask(tuple(path))
        return None if bits is None else np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(bool)

    def _mask(self, path: tuple[int, ...]) -> np.ndarray | None:
        """Return `allowed` as packed bits."""
        if self.fault is not None:
            return None
        if path not in self._bits:
            self._bits[path] = self._new_mask(path)
        return self._bits[path]

    def _new_mask(self, path: tuple[int, ...]) -> np.ndarray | None:
        if self._has_ended or self._eos.intersection(path):
            only_eos = np.zeros(-(-self._vocab_size // 8) * 8, dtype=bool)
            only_eos[list(self._eos)] = True
            return np.packbits(only_eos, bitorder="little")
        place = self._after(path)
        if place is None:
            return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        forced = place.forced()
        bits = np.frombuffer(place.mask(), dtype=np.uint8)
        self._compiled.num_masks += 1
        if place.matcher.is_error():
            return None if self._has_failed(place, path) else self._new_mask(path)
        if forced:
            bits = np.zeros(len(bits), dtype=np.uint8)
            bits[forced[0] // 8] = 1 << forced[0] % 8
        return bits

    def legal(self, tree: DraftTree) -> DraftTree:
        """Return a draft without the nodes that do not match and without the descendants of EOS."""
        if len(tree) == 1 or self.fault is not None:
            return tree
        kept, open_nodes = [0], [0]
        while open_nodes:
            parent = open_nodes.pop()
            path = tree.path_tokens(parent)
            if self._has_ended or self._eos.intersection(path) or (place := self._after(path)) is None:
                continue
            children = [node for node in tree.children[parent] if self._may_follow(place, tree.tokens[node])]
            kept += children
            open_nodes += reversed(children)
        return tree if len(kept) == len(tree) else tree.restricted(sorted(kept))

    def _may_follow(self, place: Place, token: int) -> bool:
        """Return whether a token may come at a place: the forced token, or any token that matches."""
        if token in self._eos:
            return bool(place.matcher.is_accepting())
        forced = place.forced()
        return token == forced[0] if forced else place.matcher.validate_tokens([token]) == 1

    def forced(self, most: int) -> tuple[int, ...]:
        """Return the tokens that certainly follow the output, EOS included, up to the first choice.

        Args:
          most: maximum number of tokens. ``most`` also limits the work, however long the forced text is.
        """
        return () if self.fault is not None else self._forced_after((), most)

    def guessed(self, most: int, forced: tuple[int, ...] = ()) -> Iterator[tuple[int, bool]]:
        """Yield tokens after the forced ones: the last outcome of each choice, and the tokens that it forces.

        Two choices are the same if the same tokens are allowed after the same two tokens.

        Args:
          most: maximum number of tokens, including the forced ones.
          forced: forced tokens after the output.

        Returns: tokens, and whether each is a guess.
        """
        path = forced
        for _ in range(MOST_GUESSES):
            token = self._guess(path) if len(path) < most else None
            if token is None:
                return
            yield token, True
            following = self._forced_after((*path, token), most - len(path) - 1)
            yield from ((other, False) for other in following)
            path = (*path, token, *following)

    def _guess(self, path: tuple[int, ...]) -> int | None:
        """Return the last outcome of the same choice; None for a new choice."""
        if self._has_ended or self._eos.intersection(path) or (bits := self._mask(path)) is None:
            return None
        return self._chosen.get(self._choice(bits, path))

    def _learn(self, text: Sequence[int]) -> None:
        """Record the outcomes of choices."""
        for length, token in enumerate(text):
            path = tuple(text[:length])
            if (bits := self._bits.get(path)) is not None:
                self._chosen[self._choice(bits, path)] = token

    def _forced_after(self, path: tuple[int, ...], most: int) -> tuple[int, ...]:
        if self._has_ended or self._eos.intersection(path):
            return ()
        found: tuple[int, ...] = ()
        while len(found) < most and (place := self._after((*path, *found))) is not None:
            forced = place.forced()
            if place.matcher.is_error():
                if self._has_failed(place, (*path, *found)):
                    break
            elif forced:
                found += forced
            else:
                if len(self._eos) == 1 and place.matcher.is_stopped():
                    found += tuple(self._eos)
                break
        return found[:most]

    def _choice(self, bits: np.ndarray, path: tuple[int, ...]) -> int:
        """Return the key of a choice: the mask after a path, and the tokens before it."""
        return hash((bits.tobytes(), (*self._text[-NUM_BEFORE:], *path)[-NUM_BEFORE:]))

    def _before_eos(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first EOS."""
        end = next((place for place, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end]

    def _after(self, path: Sequence[int]) -> Place | None:
        """Return the place after a path; None if the path does not match."""
        key = tuple(path)
        if key not in self._places:
            known = next(length for length in range(len(key) - 1, -1, -1) if key[:length] in self._places)
            place = self._places[key[:known]]
            self._places[key] = None if place is None else place.after(key[known:])
        return self._places[key]

    def _has_failed(self, place: Place, path: Sequence[int]) -> bool:
        """Return whether the error of the matcher after a path is final.

        After the output itself, it is a fault of the row. In a draft it is not, because the path may never be chosen.
        The logits of a failed node are ignored then, and the mask is computed again once the path is committed.
        """
        if not path:
            error = _gave_up(place.matcher)
            if FULL in str(error) and self._goes_on_alone():
                return False
            self.fault = error
        return True

    def _goes_on_alone(self) -> bool:
        """Switch to a newly compiled automaton, unless the row has its own already. Return whether this works."""
        if self._is_alone:
            return False
        try:
            alone = self._compiled.anew()
        except GrammarError:
            return False
        place = alone.place().after(self._text)
        if place is None:
            return False
        self._compiled.is_full = True
        self._compiled, self._is_alone = alone, True
        self._places = {(): place}
        self._bits.clear()
        return True

    def _why_not(self, text: Sequence[int]) -> GrammarError:
        """Return the error for tokens that cannot follow the committed output."""
        matcher = self._committed.matcher.deep_copy()
        for token in text:
            if not matcher.try_consume_tokens([token]) or matcher.is_error():
                break
        return _gave_up(matcher) if matcher.is_error() else GrammarError("the output does not match its grammar")


def _gave_up(matcher: LLMatcher) -> GrammarError:
    reason = first_line(matcher.get_error())
    if FULL in reason:
        reason = (
            f"{FULL}: an automaton may have {MAX_STATES:,}, some 64 MB, and this output needs more; make the grammar "
            "smaller, or its repetitions shorter"
        )
    return GrammarError(f"matching the grammar failed: {reason}")


def first_line(message: str) -> str:
    """Return the message of a matcher without its state: the first line, and the parser's error below it."""
    lines = message.split("\n<state>")[0].strip().splitlines() or ["no reason is known"]
    named = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *named])[:300]
