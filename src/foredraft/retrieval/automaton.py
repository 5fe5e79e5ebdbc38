"""A suffix automaton over a growing text: every earlier occurrence of its end, and what followed how often."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from foredraft.retrieval.growth import ESCAPE, Candidate

_MAX_SUCCESSORS = 32
"""Looked at after one context: the oldest, mostly the most frequent, and the newest; a long text has thousands."""


_MAX_ORDERS = 4
"""Most contexts, the longest first, that have a say in what follows."""


class MatchState(NamedTuple):
    """A string of the text: the state that stands for it, its length, and the score of the path that led here."""

    state: int
    length: int
    score: float


class SuffixAutomaton:
    """All substrings of a text, with counts, built token by token.

    Source: Blumer et al. 1985; as a drafter, SAM-Decoding (Hu et al. 2024, arXiv:2411.10666). Deviations: states
    carry how often and how recently their strings occurred, exact for strings of up to ``max_length`` tokens; the match
    is read off the suffix link of the last state, so there is no cursor that an insertion could leave behind.

    After a context of length l, seen n times, shorter contexts have a say of `ESCAPE` / (n * l + `ESCAPE`).

    Args:
      max_length: longest string (context and next token together) whose occurrences are counted; 2 or more.
      min_match: shortest context, in tokens.
      floor: candidates with a smaller score are left out.

    Cost: amortised O(1) operations per token for the automaton and at most ``max_length`` for the counts (a run of one
    token; usually a handful), whatever the length of the text. At most two states per token.
    """

    def __init__(self, max_length: int = 24, *, min_match: int = 1, floor: float = 0.0) -> None:
        self.max_length = max_length
        self._min_match = min_match
        self._floor = floor
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._recent = [0]
        self._last = 0
        self._tail, self._tail_length = 0, 0  # the state of the last max_length tokens
        self.num_tokens = 0

    def __len__(self) -> int:
        """Number of states."""
        return len(self._link)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of the text that are new since the last call."""
        for place in range(self.num_tokens, len(tokens)):
            self._append(tokens[place])

    def _append(self, token: int) -> None:
        following, link, length = self._next, self._link, self._length
        state = self._last
        new = self._last = self._add(length[state] + 1, {}, 0, 0, 0)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            known = following[state][token]
            if length[known] != length[state] + 1:
                known = self._split(state, token, known)
            link[new] = known
        self.num_tokens += 1
        self._count_suffixes(token)

    def _add(self, length: int, following: dict[int, int], link: int, count: int, recent: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._count.append(count)
        self._recent.append(recent)
        return len(self._link) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the shorter strings of ``known`` a state of their own."""
        following, link = self._next, self._link
        clone = self._add(
            self._length[state] + 1, dict(following[known]), link[known], self._count[known], self._recent[known]
        )
        while state >= 0 and following[state].get(token) == known:
            following[state][token] = clone
            state = link[state]
        link[known] = clone
        return clone

    def _count_suffixes(self, token: int) -> None:
        """One more occurrence of every suffix of up to ``max_length`` tokens."""
        link, count, recent = self._link, self._count, self._recent
        tail = self._shortened(self._tail, self._tail_length)  # its state may have been split
        self._tail_length = min(self._tail_length + 1, self.max_length)
        self._tail = state = self._shortened(self._next[tail][token], self._tail_length)
        while state > 0:
            count[state] += 1
            recent[state] = self.num_tokens
            state = link[state]

    def _shortened(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a state's strings."""
        link, lengths = self._link, self._length
        while length <= lengths[link[state]] and state:
            state = link[state]
        return state

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self) -> MatchState | None:
        """The longest end of the text that has occurred before, no longer than ``max_length`` - 1; None without one."""
        state = self._link[self._last]
        if state <= 0:
            return None
        length = self._length[state]
        if length >= self.max_length:
            length = self.max_length - 1
            state = self._shortened(self._tail, length)  # from here it is one link or two, from the match any number
        return None if length < self._min_match else MatchState(state, length, 1.0)

    def candidates(self, place: MatchState, floor: float = 0.0) -> list[Candidate]:
        """The tokens that have followed, scored by counts after this context and, for the rest, after shorter ones."""
        floor = max(floor, self._floor)
        shares: dict[int, list[float]] = {}  # token -> share, recency, length of the longest context it followed
        state, length, score = place
        rest = score
        for _ in range(_MAX_ORDERS):
            rest = self._add_shares(shares, state, length, rest, floor)
            state = self._link[state]
            length = self._length[state] if state > 0 else 0
            if length < self._min_match or rest <= self._floor / 4:
                break
        return [
            Candidate(share, int(recent), token, MatchState(int(after), int(reach), share))
            for token, (share, recent, after, reach) in shares.items()
            if share >= floor
        ]

    def _add_shares(self, shares: dict[int, list[float]], state: int, length: int, rest: float, floor: float) -> float:
        """Distribute ``rest`` over the successors of one state; what is left for shorter contexts.

        A new token that cannot come to ``floor``, whatever the shorter contexts say of it, gets nothing.
        """
        following, count = self._next[state], self._count
        if not following:
            return rest
        total, some = count[state], following.items()
        if len(following) > _MAX_SUCCESSORS:
            oldest, newest = islice(some, _MAX_SUCCESSORS // 2), islice(reversed(some), _MAX_SUCCESSORS // 2)
            some = dict([*oldest, *newest]).items()
        else:
            total = sum(count[after] for after in following.values())
        weight = rest * length / (total * length + ESCAPE)
        rest -= weight * total
        least = (floor - rest) / weight
        for token, after in some:
            known = shares.get(token)
            if known is None:
                if count[after] < least:
                    continue
                reach = length + 1
                stand = after
                if reach >= self.max_length:
                    reach = self.max_length - 1
                    stand = self._shortened(after, reach)
                shares[token] = [weight * count[after], self._recent[after], stand, reach]
            else:
                known[0] += weight * count[after]
        return rest
