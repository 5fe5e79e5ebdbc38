"""The text of one sample as it grows, with who proposed it, and without a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.engine.stopping import Detokenizer

Segments = tuple[tuple[str, str], ...]


class TextStream:
    """Releases text once it is certain: characters are complete, and no stop string has begun.

    Args:
      text: of the row, in which the engine has looked for stop strings; None gives empty text.
      stops: stop strings that may have to be cut off.
      keep_stop: leave the stop string in.
    """

    def __init__(self, text: Detokenizer | None, *, stops: Sequence[str] = (), keep_stop: bool = False) -> None:
        self._text = text
        self._held_back = () if keep_stop else tuple(stops)
        self._keep_stop = keep_stop
        self._ends: list[tuple[int, str]] = []  # where the text of a source ends
        self._source = ""
        self._released = 0

    def read(self, output_ids: Sequence[int], sources: Sequence[str]) -> None:
        """Take in what is new of the whole output: the last tokens, one for each of those who proposed them.

        Raises: what the tokenizer raises; the tokens before the one that it cannot read have been taken in then.
        """
        if self._text is None or not sources:
            return
        try:
            self._text.read(output_ids)
        finally:
            new = self._text.ends[len(output_ids) - len(sources) : len(output_ids)]
            self._ends += zip(new, sources, strict=False)
            self._source = sources[len(new) - 1] if new else self._source

    @property
    def num_read(self) -> int:
        """How many tokens have been taken in."""
        return 0 if self._text is None else len(self._text.ends)

    def release(self) -> Segments:
        """The new text that no later token can take back."""
        if self._text is None:
            return ()
        return self._release(self._text.text, len(self._text.text) - _overlap(self._text.text, self._held_back))

    def finish(self) -> Segments:
        """The rest, without the stop string that ended the row unless it is to be kept."""
        if self._text is None:
            return ()
        if self._text.stop is not None:
            start, end = self._text.stop
            return self._release(self._text.text, end if self._keep_stop else start)
        if self._text.finish():
            self._ends.append((len(self._text.text), self._source))
        return self._release(self._text.text, len(self._text.text))

    @property
    def released(self) -> str:
        """All text that was released."""
        return "" if self._text is None else self._text.text[: self._released]

    def _release(self, text: str, end: int) -> Segments:
        segments: list[tuple[str, str]] = []
        for stop, source in self._ends:
            piece = text[self._released : min(stop, end)]
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
