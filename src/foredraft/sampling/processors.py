"""The logits processors of one row and their history: they turn raw logits into scores, before any temperature.

Order and meaning follow transformers 5.23 ``generate`` in float32: logit bias, repetition penalty, presence and
frequency penalty (vLLM's, output tokens only), no-repeat n-grams, bad words, minimum length, custom processors. The
masks of allowed tokens and of a grammar come last. Every node sees its own path as prefix: the row's incremental
history, followed by the tokens of the path.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.config.keywords import shown
from foredraft.config.sampling import SamplingParams, check_named_tokens
from foredraft.errors import ConfigError, ShapeError, as_exception, is_fatal
from foredraft.sampling import noise
from foredraft.sampling.filters import LogitsFilter
from foredraft.sampling.history import Followers, TokenCounts
from foredraft.structured.matching import Matching

Path = Sequence[int]
Entries = tuple[np.ndarray, ...]
"""Token ids int64 (S,) of one node, and arrays of values for them."""


class Sampler:
    """The processed distribution of one row: its parameters and the history that they depend on.

    Args:
      params: parameters of the request, with ``bad_words`` already resolved to ``bad_words_ids``.
      vocab_size: V of the target.
      eos_token_ids: tokens that end a row. EOS tokens are impossible before ``min_tokens``, and never count as bad
        words.
      prompt_ids: the prompt, which counts for penalties on repetition.
      history_ids: the prompt that n-grams, bad words and custom processors read, with its padding; by default
        ``prompt_ids``.
      device: device of the logits.
      matching: state of the grammar that the output must match, if there is one.

    Attributes:
      seed: seed of the row. The engine sets the seed. Before that, it is the seed of ``params``, or a random one.
      eos_token_ids: the argument.
      custom_processor_seconds: time spent in ``params.logits_processors``.
      contains_faults: True if an exception of a custom processor only leaves its nodes without a distribution.
      fault: exception of the last call of the custom processors, or of the grammar; None without one.

    Raises: ConfigError when a bias, bad word or stop token lies outside the vocabulary, or bad words are not resolved.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        prompt_ids: Sequence[int] = (),
        history_ids: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        matching: Matching | None = None,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seed = noise.fresh_seed() if params.seed is None else params.seed
        self.custom_processor_seconds = 0.0
        self.contains_faults = False
        self.fault: Exception | None = None
        self.num_output_tokens = 0
        self.is_greedy = params.temperature == 0.0
        self.warper = LogitsFilter() if self.is_greedy else LogitsFilter.of(params)
        self.kind = (params.temperature, *(() if self.is_greedy else self.warper.truncation))
        self.matching = matching
        self._check_vocabulary()
        eos = self.eos_token_ids = tuple(eos_token_ids)
        self._tokens = array("q", prompt_ids if history_ids is None else history_ids)
        self._seen = TokenCounts(prompt_ids) if params.repetition_penalty != 1.0 else None
        self._output = TokenCounts() if params.presence_penalty or params.frequency_penalty else None
        self._ngrams = Followers() if params.no_repeat_ngram_size else None
        self._index_ngrams(0)
        self._bad_words = Followers() if params.bad_words_ids else None
        for *run, last in params.bad_words_ids or ():
            if self._bad_words is not None and (run or last not in eos):  # as transformers' NoBadWordsLogitsProcessor
                self._bad_words.add(run, last)
        self._stop_ids = (*eos, *(params.stop_token_ids or ())) if params.min_tokens else ()

    def _check_vocabulary(self) -> None:
        if self.params.structured_outputs is not None and self.matching is None:
            raise ConfigError(f"{self.params.structured_outputs} was not compiled for a tokenizer; use LLM or Engine")
        check_named_tokens(self.params, self.vocab_size)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add committed output tokens to the history; O(1) per token."""
        tokens = list(tokens)
        self.num_output_tokens += len(tokens)
        num_known = len(self._tokens)
        self._tokens.extend(tokens)
        self._index_ngrams(num_known)
        if self._seen is not None:
            self._seen.extend(tokens)
        if self._output is not None:
            self._output.extend(tokens)
        if self.matching is not None:
            self.matching.extend(tokens)

    def _index_ngrams(self, start: int) -> None:
        """Index the n-grams that end with a token at index ``start`` or later."""
        if self._ngrams is not None:
            self._ngrams.add_ngrams(self.params.no_repeat_ngram_size, self._tokens, start)

    @property
    def is_argmax(self) -> bool:
        """True if the chosen token is the argmax of the raw logits."""
        return self.is_greedy and not self.is_processed

    @property
    def is_processed(self) -> bool:
        """True if any processor may still change the logits. A minimum length no longer counts once it is reached."""
        return self._has_processors or (bool(self._stop_ids) and self.num_output_tokens < self.params.min_tokens)

    @cached_property
    def _has_processors(self) -> bool:
        params = self.params
        history = (self._seen, self._output, self._ngrams, self._bad_words, self.matching)
        named = params.logit_bias or params.logits_processors or params.allowed_token_ids
        return bool(named) or any(part is not None for part in history)

    # -- changes of one node: ids and values, in HF's order of processors ----------------------------------------

    @cached_property
    def _bias(self) -> Entries:
        bias = self.params.logit_bias or {}
        return np.array([*bias.keys()], dtype=np.int64), np.array([*bias.values()], dtype=np.float32)

    def biases(self, path: Path) -> Entries | None:
        """Tokens and the values to add to their logits."""
        return self._bias if self.params.logit_bias else None

    def repetitions(self, path: Path) -> Entries | None:
        """Tokens of prompt, output and path, and the repetition penalty."""
        if self._seen is None:
            return None
        ids, _ = self._seen.with_path(path)
        return ids, np.full(len(ids), self.params.repetition_penalty, dtype=np.float32)

    def occurrences(self, path: Path) -> Entries | None:
        """Tokens of output and path, with their frequency penalties and their presence penalties."""
        if self._output is None:
            return None
        ids, counts = self._output.with_path(path)
        presence = np.full(len(ids), self.params.presence_penalty, dtype=np.float32)
        return ids, counts * np.float32(self.params.frequency_penalty), presence

    def bans(self, path: Path) -> Entries | None:
        """Impossible tokens, which would repeat an n-gram, complete a bad word, or end the output too early."""
        banned: set[int] = set()
        if self._ngrams is not None:
            size = self.params.no_repeat_ngram_size
            tail = self._tail(size - 1, path)
            in_path = Followers()
            in_path.add_ngrams(size, tail, len(tail) - len(path))
            banned |= self._ngrams.after(tail) | in_path.after(tail)
        if self._bad_words is not None:
            banned |= self._bad_words.after(self._tail(self._bad_words.longest, path))
        if self._stop_ids and self.num_output_tokens + len(path) < self.params.min_tokens:
            banned.update(self._stop_ids)
        return (np.fromiter(banned, dtype=np.int64, count=len(banned)),) if banned else None

    def _tail(self, width: int, path: Path) -> list[int]:
        """Return the last ``width`` tokens of the row, or fewer if it is shorter, followed by the path."""
        return [*self._tokens[max(0, len(self._tokens) - width) :], *path]

    def run_custom(self, scores: Tensor, paths: Sequence[Path]) -> Tensor:
        """Run the user's processors on nodes of one depth d: float32 (b, V) and b paths -> float32 (b, V).

        Custom processors receive whole prefixes, (b, T + d). If faults are contained, an exception is stored in
        ``fault``, and the scores of the nodes become NaN.
        """
        length = len(self._tokens)
        ids = np.empty((len(paths), length + len(paths[0])), dtype=np.int64)
        ids[:, :length] = self._tokens
        ids[:, length:] = paths
        prefixes = torch.from_numpy(ids).to(scores.device)
        start, shape = perf_counter(), scores.shape
        self.fault = None
        try:
            for processor in self.params.logits_processors or ():
                scores = checked_scores(processor, processor(prefixes, scores), shape)
        except BaseException as fault:
            if is_fatal(fault) or not self.contains_faults:
                raise
            self.fault = as_exception(fault)
            return torch.full(shape, torch.nan, device=prefixes.device)
        self.custom_processor_seconds += perf_counter() - start
        return scores.float()

    @cached_property
    def _allowed(self) -> Tensor | None:
        allowed = self.params.allowed_token_ids
        return None if allowed is None else torch.tensor(allowed, device=self.device)

    def mask(self, scores: Tensor, path: Path) -> None:
        """Set scores of one node (V,) to -inf, in place, for tokens that are not allowed or do not match the grammar.

        After a fault of the grammar all scores become NaN.
        """
        if self._allowed is not None:
            ids = self._allowed[self._allowed < len(scores)].to(scores.device)
            kept = scores[ids]
            scores.fill_(-torch.inf)
            scores[ids] = kept
        if self.matching is None:
            return
        if (only := self.matching.only(path)) is not None:
            own = scores[only : only + 1].clone()  # empty where the model has no such token
            scores.fill_(-torch.inf)
            scores[only : only + 1] = own
            return
        allowed = self.matching.allowed(path)
        if allowed is None:
            self.fault = self.matching.fault
            scores.fill_(torch.nan)
            return
        size = min(len(allowed), len(scores))
        scores[:size].masked_fill_(torch.from_numpy(~allowed[:size]).to(scores.device), -torch.inf)
        scores[size:] = -torch.inf


def process(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> Tensor:
    """Apply all processors: (M, V) of any float dtype -> float32 (M, V), before the temperature.

    The input itself is returned if it is float32 and no processor is active. The input is never modified.
    """
    return processed(logits, samplers, paths).float()


def processed(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> Tensor:
    """Like `process`, but if no processor is active, return the input unchanged, in its own dtype."""
    check_shapes(logits, samplers, paths)
    active = [row for row, sampler in enumerate(samplers) if sampler.is_processed]
    if not active:
        return logits
    scores = logits.detach().to(torch.float32, copy=True)
    apply_entries(scores, [(row, samplers[row], paths[row]) for row in active], as_arrays=scores.device.type == "cpu")
    for sampler, rows in _by_prefix_length(active, samplers, paths):
        scores[rows] = sampler.run_custom(scores[rows], [paths[row] for row in rows])
    for row in active:
        samplers[row].mask(scores[row], paths[row])
    return scores


def apply_entries(scores: Tensor, nodes: Sequence[tuple[int, Sampler, Path]], as_arrays: bool) -> None:
    """Apply penalties, biases and bans of single tokens to ``scores`` (M, V) in place, one gather and scatter each.

    ``as_arrays`` uses numpy's view of CPU memory, whose indexing is several times faster than torch's.
    """
    flat: Any = scores.view(-1).numpy() if as_arrays else scores.view(-1)
    where_of: Any = np.where if as_arrays else torch.where

    def gathered(entries_of: Callable[[Sampler, Path], Entries | None]) -> list[Any]:
        arrays = _gathered([(row, entries_of(sampler, path)) for row, sampler, path in nodes], scores.shape[1])
        return arrays if as_arrays else [torch.from_numpy(array).to(scores.device) for array in arrays]

    if added := gathered(Sampler.biases):
        where, bias = added
        flat[where] = flat[where] + bias
    if repeated := gathered(Sampler.repetitions):
        where, penalty = repeated
        values = flat[where]
        flat[where] = where_of(values < 0, values * penalty, values / penalty)
    if counted := gathered(Sampler.occurrences):
        where, frequency, presence = counted
        flat[where] = flat[where] - frequency - presence
    if banned := gathered(Sampler.bans):
        flat[banned[0]] = -torch.inf


def check_shapes(logits: Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> None:
    if logits.ndim != 2 or not logits.shape[0] == len(samplers) == len(paths):
        raise ShapeError(
            f"logits {tuple(logits.shape)}, {len(samplers)} samplers, {len(paths)} paths; they must be (M, V), M and M"
        )


def _gathered(parts: Sequence[tuple[int, Entries | None]], vocab_size: int) -> list[np.ndarray]:
    """Return the entries of several rows as flat indices into (M, V), and their values; empty if no row has any.

    Token 3 of row 2 at V = 10 becomes 23. Tokens outside the vocabulary of the logits are left out.
    """
    columns: list[list[np.ndarray]] = []
    for row, entries in parts:
        if entries is None or not len(entries[0]):
            continue
        ids, *values = entries
        if ids.max() >= vocab_size:
            inside = ids < vocab_size
            ids, values = ids[inside], [value[inside] for value in values]
        columns.append([ids + row * vocab_size, *values])
    return [part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*columns, strict=True)]


def _by_prefix_length(
    rows: Sequence[int], samplers: Sequence[Sampler], paths: Sequence[Path]
) -> list[tuple[Sampler, list[int]]]:
    """Group nodes with custom processors by row and depth."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        if samplers[row].params.logits_processors:
            groups.setdefault((id(samplers[row]), len(paths[row])), []).append(row)
    return [(samplers[group[0]], group) for group in groups.values()]


def checked_scores(processor: object, scores: Any, shape: tuple[int, ...]) -> Tensor:
    """Check and return the scores that a user's processor has returned.

    Raises: ShapeError, with the name of the processor, for anything but a tensor of this shape.
    """
    if isinstance(scores, Tensor) and tuple(scores.shape) == tuple(shape):
        return scores
    found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    raise ShapeError(f"logits processor {shown(processor)} returned {found}; it must return scores {tuple(shape)}")
