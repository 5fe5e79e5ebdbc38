"""Ends of rows: budget, context, EOS, stop tokens and stop strings, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from foredraft.config.sampling import SamplingParams

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class Detokenizer:
    """The text of one output, which grows as tokens arrive; characters appear once they are complete.

    It is the only text of an output, streamed or whole. It equals ``tokenizer.decode(output_ids)``, but complete
    characters stay, also with a decoder that takes them back when bytes that form none follow. Only a few trailing
    tokens are decoded at a time, each of them once: whoever needs the text first takes the tokens in, a search for stop
    strings or the stream that shows it.

    Attributes:
      text: up to the last complete character, a stop string included.
      ends: where in the text each token ends.
      stop: where the stop string that ended the output begins and ends; None unless one did.
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
        """The text that this token completes, possibly empty. What the tokenizer raises leaves all as it was."""
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
        """Append what is new of the whole output, which begins at ``start``."""
        for token in token_ids[start + len(self.ends) :]:
            self.append(token)

    def finish(self) -> str:
        """Append the text of trailing tokens that never became complete, and return it."""
        rest = self.rest()
        self.text += rest
        self._complete, self._rest = [], []
        return rest

    def rest(self) -> str:
        """Text of the tokens since the last complete character: replacement characters at its end may change.

        A decoder that joins single bytes (byte fallback) reads a run of them as a whole. Where the end of the run is no
        character, it gives up those before, too: the end is then decoded alone.
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
    """Why a row ended: vLLM's reason ("stop", "length", "abort", "error") and what caused it."""

    reason: str
    cause: int | str | None = None


class StopChecker:
    """Decides after every single token whether a row ends with it.

    Args:
      params: budget, stop tokens and stop strings.
      eos_token_ids: of the model; any of them ends the row unless ``ignore_eos``.
      num_prompt_tokens, max_length: prompt length, and the limit for prompt and output together.
      tokenizer: needed for stop strings only.

    Attributes:
      text: in which stop strings are looked for, and which the user gets. It takes tokens in here where there are stop
        strings, and costs nothing where there are none; None without a tokenizer, or where no text is wanted.
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
        """Take in the next token; the reason to end with it, or None."""
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
        """Place where the text that this token completes is to be cut, and the stop string that cuts it."""
        known = len(text.text)
        return find_stop(text.text, self._stops, known) if text.append(token) else None


def find_stop(text: str, stops: Iterable[str], known: int = 0) -> tuple[int, str] | None:
    """Place where the text is to be cut and the stop string that cuts it, as if it had arrived character by character.

    The match that ends first wins; among those that end together, the longest. ``known`` characters are known to
    hold no match: only matches that end after them count.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[1], best[2])
