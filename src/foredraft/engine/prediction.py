"""The output that a user predicts, as drafts: what follows in it where it agrees with the text so far."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

PREDICTION = "prediction"
"""Name of what proposed its tokens."""

FIRST = 8
"""Tokens that are drafted of a prediction before anything is known of it."""

LONGEST = 32
"""Tokens of a draft, however long the prediction has been right."""

SURE = 16
"""Tokens before a place, at most, whose agreement counts: more make it no likelier."""

NEAR = 16
"""Tokens within which an output that has differed in a few is expected back, so that one token tells the place."""

MOST_PLACES = 32
"""Places after a token that are looked at on either side, so that one that is everywhere costs no more than another."""


class Prediction:
    """Where an output is in its prediction.

    It begins with the first token. While the output agrees it goes on; where it differs, the place is looked for anew
    that the most of the newest tokens lead to, among equals the nearest to where it was: what was inserted, left out or
    replaced is passed by. A draft is twice as long as what has agreed of late, so that a wrong place costs little.

    Args:
      tokens: of the whole predicted output.
      start: where in a row its output begins.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tuple(tokens)
        self._start = start
        self._num_seen = start
        self._place: int | None = 0  # of the next token; None where the output is elsewhere
        self._last = 0  # place where it was last
        self._agreed = FIRST // 2
        self._places: dict[int, list[int]] = {}  # after every token
        for place, token in enumerate(self.tokens, 1):
            self._places.setdefault(token, []).append(place)

    def copy(self) -> Prediction:
        """The same prediction for another sample of its prompt, which has said nothing yet."""
        other = Prediction((), self._start)
        other.tokens, other._places = self.tokens, self._places
        return other

    def draft(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        """What is likely to follow a row, which has grown since the last call; ``depth`` tokens at most."""
        for end in range(self._num_seen + 1, len(token_ids) + 1):
            self._follow(token_ids, end)
        self._num_seen = len(token_ids)
        if self._place is None:
            return ()
        return self.tokens[self._place : self._place + min(2 * self._agreed, LONGEST, depth)]

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Take in the token before ``end``."""
        place = self._place
        if place is not None and place < len(self.tokens) and self.tokens[place] == token_ids[end - 1]:
            self._place, self._agreed = place + 1, self._agreed + 1
        else:
            self._place, self._agreed = self._find(token_ids, end)
        self._last = self._last if self._place is None else self._place

    def _find(self, token_ids: Sequence[int], end: int) -> tuple[int | None, int]:
        """The likeliest place after an output, and how many tokens lead there; None where nothing near or sure does.

        Of a prediction "a b c d" and an output "a x c" the place is 3, before "d", and "c" alone leads there.
        """
        places = self._places.get(token_ids[end - 1], ())
        middle = bisect(places, self._last)
        best: tuple[int, int, int] | None = None
        for place in places[max(0, middle - MOST_PLACES) : middle + MOST_PLACES]:
            length, most = 1, min(place, end - self._start, SURE)
            while length < most and self.tokens[place - 1 - length] == token_ids[end - 1 - length]:
                length += 1
            distance = abs(place - self._last - 1)
            if (length > 1 or distance <= NEAR) and (best is None or (length, -distance) > best[:2]):
                best = length, -distance, place
        return (None, 0) if best is None else (best[2], best[0])
