"""A suffix automaton over a growing text: earlier occurrences of its suffixes, and counts of the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from foredraft.retrieval.growth import ESCAPE, Candidate

_MAX_SUCCESSORS = 32
"""Largest number of successors to look at after one context: half the oldest, which are mostly the most frequent, and
half the newest. A long text has thousands."""


_MAX_ORDERS = 4
"""Largest number of contexts, the longest first, that contribute to the scores."""


class MatchState(NamedTuple):
    """A string of the text: its state, its length, and the score of the path that led to it."""

    state: int
    length: int
    score: float


class SuffixAutomaton:
    """All substrings of a text with counts, built token by token.

    Source: Blumer et al. 1985; as a drafter, SAM-Decoding (Hu et al. 2024, arXiv:2411.10666). Deviations: states
      contain how often and how recently their strings occurred, exactly for strings of up to ``max_length`` tokens. The
      match is derived from the suffix link of the last state, so an insertion cannot invalidate it.

    After a context of length l that occurred n times, shorter contexts have the weight `ESCAPE` / (n * l + `ESCAPE`).

    Args:
      max_length: length in tokens, 2 or more, of the longest string (context and next token) whose occurrences are
        counted.
      min_match: length of the shortest context, in tokens.
      floor: smallest score of a candidate.

    Cost: amortised O(1) operations per token for the automaton, and at most ``max_length`` for the counts (usually a
    few; the worst case is a run of one token), at any length of the text. At most two states per token.
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
        self._tail, self._tail_length = 0, 0  # state and length of the last max_length tokens
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._link)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens of the text that are new since the last call."""
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
        """Move the shorter strings of ``known`` to a new state."""
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
        """Count one more occurrence of every suffix of up to ``max_length`` tokens."""
        link, count, recent = self._link, self._count, self._recent
        tail = self._shortened(self._tail, self._tail_length)  # the stored state may have been split
        self._tail_length = min(self._tail_length + 1, self.max_length)
        self._tail = state = self._shortened(self._next[tail][token], self._tail_length)
        while state > 0:
            count[state] += 1
            recent[state] = self.num_tokens
            state = link[state]

    def _shortened(self, state: int, length: int) -> int:
        """Return the state of the last ``length`` tokens of a state's strings."""
        link, lengths = self._link, self._length
        while length <= lengths[link[state]] and state:
            state = link[state]
        return state

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self) -> MatchState | None:
        """Return the longest suffix of the text, up to ``max_length`` - 1 tokens, that occurred before; None if there
        is none."""
        state = self._link[self._last]
        if state <= 0:
            return None
        length = self._length[state]
        if length >= self.max_length:
            length = self.max_length - 1
            state = self._shortened(self._tail, length)  # one or two links from the tail, but many from the match
        return None if length < self._min_match else MatchState(state, length, 1.0)

    def candidates(self, place: MatchState, floor: float = 0.0) -> list[Candidate]:
        """Return the tokens that followed this context, scored by its counts and, with a smaller weight, by shorter
        contexts."""
        floor = max(floor, self._floor)
        shares: dict[int, list[float]] = {}  # token -> score, recency, state after it, length of that state's string
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
        """Distribute ``rest`` over the successors of one state. Return the remainder, which is for shorter contexts.

        A new token is left out if it cannot reach ``floor`` with any shares of the shorter contexts.
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
