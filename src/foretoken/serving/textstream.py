"""The text of one sample as it grows, with who proposed it, and without a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.engine.stopping import Detokenizer, find_stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segments = tuple[tuple[str, str], ...]


class TextStream:
    """Releases text once it is certain: characters are complete, and no stop string has begun.

    Args:
      tokenizer: None gives empty text.
      stops: stop strings that may have to be cut off.
      keep_stop: leave the stop string in.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        )
        self._held_back = () if keep_stop else tuple(stops)
        self._keep_stop = keep_stop
        self._ends: list[tuple[int, str]] = []  # where the text of a source ends
        self._source = ""
        self._released = 0
        self._known = 0

    @property
    def text(self) -> str:
        """All text up to the last complete character, the stop string included."""
        return self._detokenizer.text if self._detokenizer else ""

    def append(self, token: int, source: str) -> None:
        """Take in one token that ``source`` proposed."""
        if self._detokenizer is not None:
            self._known = len(self.text)
            self._source = source
            self._detokenizer.append(token)
            self._ends.append((len(self.text), source))

    def release(self) -> Segments:
        """The new text that no later token can take back."""
        return self._release(len(self.text) - _overlap(self.text, self._held_back))

    def finish(self, stop: str | None = None) -> Segments:
        """The rest, cut at the stop string that ended the sample."""
        if self._detokenizer is None:
            return ()
        found = find_stop(self.text, (stop,), self._known) if stop is not None else None
        if found is not None:
            return self._release(found[0] + (len(found[1]) if self._keep_stop else 0))
        if self._detokenizer.finish():
            self._ends.append((len(self.text), self._source))
        return self._release(len(self.text))

    @property
    def released(self) -> str:
        """All text that was released."""
        return self.text[: self._released]

    def _release(self, end: int) -> Segments:
        segments: list[tuple[str, str]] = []
        for stop, source in self._ends:
            piece = self.text[self._released : min(stop, end)]
            if piece:
                segments.append((piece, source))
                self._released += len(piece)
        self._ends = [(stop, source) for stop, source in self._ends if stop > self._released]
        return tuple(segments)


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string: "ab" overlaps "bc" by 1."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
