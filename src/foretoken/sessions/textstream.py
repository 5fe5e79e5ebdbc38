"""The tokens and the text of one row as they grow, with who proposed them, and without a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

from foretoken.engine.joining import GRAMMAR, GUESSED
from foretoken.engine.prediction import PREDICTION
from foretoken.law.faults import is_fatal, told

if TYPE_CHECKING:
    from foretoken.engine.logprobs import TokenLogprobs
    from foretoken.engine.outputs import RowOutput
    from foretoken.engine.sequence import Sequence

Segments = tuple[tuple[str, str], ...]
"""Pieces of text, each with the name of what proposed it."""

TARGET = "target"
OF_REQUESTS = (PREDICTION, GRAMMAR, GUESSED)
"""Names of what requests draft by themselves."""


class TextStream:
    """Output of a row as whoever waits for it sees it: the i-th of the n texts of a request.

    Text is released once it is certain: characters are complete, and no stop string has begun.

    Args:
      row: of the engine, whose text this is; no text where the row has none.

    Attributes:
      token_ids, logprobs: so far; fewer than the row has where the tokenizer could not read one.
      finish_reason, stop_reason: why it has ended; None while it has not.
      error: that ended it.
      started, ended: when its first decode step began and its newest one ended.
    """

    def __init__(self, row: Sequence) -> None:
        self.row = row
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.started: float | None = None
        self.ended = 0.0
        self._text = row.text
        self._keeps_stop = row.params.include_stop_str_in_output
        self._held_back = () if self._keeps_stop else tuple(row.params.stop_strings)
        self._ends: list[tuple[int, str]] = []  # where the text of a source ends
        self._source = ""
        self._released = 0
        if row.num_output_tokens:  # it goes on from what was said before, and delivered as far as that was certain
            self.token_ids += row.output_ids
            if self._text is not None:
                self._text.read(self.token_ids)
                self._released = self._certain(self._text.text)

    def take(self, output: RowOutput, drafter_name: str, started: float, ended: float) -> bool:
        """Take in what a step, between these times, has added to the row.

        Returns: whether all of it could be read; the text ends with the reason "error" before a token that cannot.
        """
        self.started = started if self.started is None else self.started
        self.ended = ended
        self.error = output.error
        self.logprobs += output.logprobs
        self.finish_reason, self.stop_reason = output.row.finish_reason, output.row.stop_reason
        num_others = len(output.token_ids) - output.num_accepted
        try:
            drafters = [source if source in OF_REQUESTS else drafter_name for source in output.sources]
            drafters += [drafter_name] * (output.num_accepted - len(drafters))
            self.read(output.token_ids, drafters + [TARGET] * num_others)
        except Exception as fault:
            if is_fatal(fault):
                raise
            num_read = 0 if self._text is None else len(self._text.ends)
            del self.token_ids[num_read:], self.logprobs[num_read:]
            self.error, self.finish_reason, self.stop_reason = fault, "error", told(fault)
            return False
        return True

    def read(self, tokens: Seq[int], sources: Seq[str]) -> None:
        """Append tokens and take in their text, of each that which its source has proposed.

        Raises: what the tokenizer raises; the text of the tokens before the one that it cannot read is taken in then.
        """
        self.token_ids += tokens
        if self._text is None or not sources:
            return
        try:
            self._text.read(self.token_ids)
        finally:
            new = self._text.ends[len(self.token_ids) - len(sources) : len(self.token_ids)]
            self._ends += zip(new, sources, strict=False)
            self._source = sources[len(new) - 1] if new else self._source

    def release(self) -> Segments:
        """The new text that no later token can take back, all of it once the row has ended.

        A stop string that ended the row is left out unless it is to be kept.
        """
        if self._text is None:
            return ()
        text = self._text
        if self.finish_reason is None:
            return self._release(self._certain(text.text))
        if text.stop is not None:
            start, end = text.stop
            return self._release(end if self._keeps_stop else start)
        if text.finish():
            self._ends.append((len(text.text), self._source))
        return self._release(len(text.text))

    @property
    def num_released(self) -> int:
        """Characters that were released."""
        return self._released

    def _certain(self, text: str) -> int:
        """Length of the text that no later token can take back, of a row that goes on."""
        return len(text) - _overlap(text, self._held_back)

    @property
    def released(self) -> str:
        """All text that was released."""
        return "" if self._text is None else self._text.text[: self._released]

    def pieces(self, num_tokens: int, num_released: int) -> tuple[str, ...]:
        """Text released beyond so many characters, by the newest tokens that made it certain.

        What is not yet certain goes with the token after which it is; all that is left, with the last one.
        """
        text = self.released
        ends = [] if self._text is None else self._text.ends[len(self.token_ids) - num_tokens : len(self.token_ids)]
        places = [num_released, *(min(max(end, num_released), len(text)) for end in ends)]
        places += [len(text)] * (num_tokens + 1 - len(places))
        places[-1] = len(text)
        return tuple(text[start:end] for start, end in pairwise(places))

    def _release(self, end: int) -> Segments:
        assert self._text is not None
        segments: list[tuple[str, str]] = []
        for stop, source in self._ends:
            piece = self._text.text[self._released : min(stop, end)]
            if piece:
                segments.append((piece, source))
                self._released += len(piece)
        self._ends = [(stop, source) for stop, source in self._ends if stop > self._released]
        return tuple(segments)


def _overlap(text: str, stops: Seq[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string: "ab" overlaps "bc" by 1."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
