"""Ends of rows: budget, context, EOS, stop tokens and stop strings, checked token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from foredraft.config.sampling import SamplingParams

REPLACEMENT = "\ufffd"  # character to which an unfinished UTF-8 sequence decodes


class Detokenizer:
    """The text of one output, which grows as tokens arrive. A character appears once it is complete.

    The detokenized text is the only text of an output, streamed or whole. The text equals
    ``tokenizer.decode(output_ids)`` with one exception: complete characters stay, even if the decoder would take them
    back when incomplete bytes follow. Only a few trailing
    tokens are decoded at a time. Each is decoded once, for the search for stop strings or for a stream.

    Attributes:
      text: text up to the last complete character, a stop string included.
      ends: index in the text at which each token ends.
      stop: start and end of the stop string that ended the output; None if none did.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self.ends: list[int] = []
        self.stop: tuple[int, int] | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._complete: list[int] = []  # tokens of the last complete characters,
        self._rest: list[int] = []  # and those after them

    def append(self, token: int) -> str:
        """Add a token; return the text that it completes, possibly empty. If the tokenizer raises, nothing changes."""
        self._rest.append(token)
        try:
            rest = self.rest()
        except BaseException:
            self._rest.pop()
            raise
        piece = "" if rest.endswith(REPLACEMENT) else rest
        if piece:
            self._complete, self._rest = self._rest, []
            self.text += piece
        self.ends.append(len(self.text))
        return piece

    def read(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Append the new tokens of a row whose output begins at index ``start``."""
        for token in token_ids[start + len(self.ends) :]:
            self.append(token)

    def finish(self) -> str:
        """Append the text of trailing tokens that never became complete, and return it."""
        rest = self.rest()
        self.text += rest
        self._complete, self._rest = [], []
        return rest

    def rest(self) -> str:
        """Text of the tokens since the last complete character. Replacement characters at its end may still change.

        A decoder that joins single bytes (byte fallback) decodes a run of bytes as a whole. If the run ends with an
        incomplete character, it replaces the complete ones before it, too. The tokens after the last complete character
        are therefore decoded separately.
        """
        if not self._rest:
            return ""
        decode, skips = self._tokenizer.decode, self._skip_special_tokens
        after = str(decode(self._complete + self._rest, skip_special_tokens=skips))
        if not self._complete:
            return after
        before = str(decode(self._complete, skip_special_tokens=skips))
        return after[len(before) :] if after.startswith(before) else str(decode(self._rest, skip_special_tokens=skips))


@dataclass(frozen=True)
class Finish:
    """Reason for the end of a row: vLLM's reason ("stop", "length", "abort", "error") and its cause."""

    reason: str
    cause: int | str | None = None


class StopChecker:
    """Decides after every single token whether a row ends.

    Args:
      params: sampling parameters with budget, stop tokens and stop strings.
      eos_token_ids: EOS tokens of the model; any of them ends the row unless ``ignore_eos``.
      num_prompt_tokens, max_length: prompt length, and the limit for prompt and output together.
      tokenizer: tokenizer, needed only for stop strings.

    Attributes:
      text: text of the output, in which stop strings are searched. With stop strings, `check` decodes every token;
        without them, `check` decodes nothing. None without a tokenizer, or if no text is requested.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        num_prompt_tokens: int,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._min_tokens = params.min_tokens
        self._length = num_prompt_tokens
        self._first = num_prompt_tokens
        self._max_length = max_length
        self.text: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self.text = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop_strings

    def check(self, token: int) -> Finish | None:
        """Process the next token; return the reason to end the row with it, or None."""
        self._length += 1
        found = self._find_stop(self.text, token) if self._stops and self.text is not None else None
        if self._length - self._first >= self._min_tokens:
            if token in self._eos:
                return Finish("stop")
            if token in self._stop_ids:
                return Finish("stop", token)
            if found is not None and self.text is not None:
                start, stop = found
                self.text.stop = start, start + len(stop)
                return Finish("stop", stop)
        return Finish("length") if self._length >= self._max_length else None

    def _find_stop(self, text: Detokenizer, token: int) -> tuple[int, str] | None:
        """Decode a token; return the index at which the text must be cut and the stop string, or None."""
        known = len(text.text)
        return find_stop(text.text, self._stops, known) if text.append(token) else None


def find_stop(text: str, stops: Iterable[str], known: int = 0) -> tuple[int, str] | None:
    """Return the index at which to cut a text, and the stop string. The result is the same as if the text had arrived
    character by character.

    The match that ends first wins; among matches that end together, the longest. The first ``known`` characters contain
    no match, so only matches that end after them are considered.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[1], best[2])
