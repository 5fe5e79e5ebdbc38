"""Beam search over rows of one cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from foretoken.classic.reader import TextReader
from foretoken.classic.request import Request
from foretoken.classic.trace import Step
from foretoken.errors import ConfigError, NumericsError


@dataclass(frozen=True)
class Beam:
    """One output in the making.

    Args:
      score: its log-probability; divided by the length penalty once it has ended.
      tokens: generated so far.
      parent: row of the cache that holds all of them but the last.
    """

    score: float
    tokens: tuple[int, ...]
    parent: int = 0


class BeamSearch:
    """Keeps the ``num_beams`` likeliest running outputs, and as many that have ended.

    An output ends with an end-of-sequence token or at the limit, and counts only if it is among the best
    ``num_beams`` of its step, as in transformers. The search is over when no running output can beat the
    best of them any more.

    Beams are no drafts, and nothing else in foretoken searches: the engine refuses them by name.

    Args:
      reader: of the model, with a cache.
      top_k: continuations of every beam that are looked at, at most V.
      min_length, alpha: of the length penalty, see `penalty`.

    Raises: ConfigError when ``min_length`` is not above -1.
    """

    def __init__(
        self,
        request: Request,
        reader: TextReader,
        num_beams: int,
        top_k: int,
        min_length: float,
        alpha: float,
    ) -> None:
        if not min_length > -1.0:
            raise ConfigError(f"min_length is {min_length}; it must be above -1, or the length penalty has no value")
        self._request = request
        self._reader = reader
        self._num_beams = num_beams
        self._top_k = top_k
        self._min_length = min_length
        self._alpha = alpha
        self._longest = request.max_length - len(request.prompt)
        self.running = [Beam(0.0, ())]
        self.finished: list[Beam] = []
        self.length = 0

    @property
    def best(self) -> tuple[int, ...]:
        """The likeliest output that has ended; empty before there is any."""
        return self.finished[0].tokens if self.finished else ()

    def penalty(self, length: int) -> float:
        """Length penalty: the divisor of the log-probability of an output of ``length`` tokens."""
        return float(((self._min_length + length) / (self._min_length + 1.0)) ** self._alpha)

    def steps(self) -> Iterator[Step]:
        """Extend all beams by one token at a time, in one forward each."""
        while self.length < self._longest and self._can_improve():
            start = perf_counter()
            logits = self._read()
            middle = perf_counter()
            self.length += 1
            self._select(self._candidates(logits))
            position = len(self._request.prompt) + self.length - 1
            best = (self.running or self.finished)[0].tokens[-1]
            yield Step(position, 0, None, (), 0, best, False, 0.0, middle - start, perf_counter() - middle)

    def _read(self) -> Tensor:
        """Logits (B, V) after the running beams."""
        prompt = self._request.prompt
        if not self.length:
            return self._reader.read(prompt)
        texts = [(*prompt, *beam.tokens) for beam in self.running]
        return self._reader.read_beams(texts, [beam.parent for beam in self.running])

    def _candidates(self, logits: Tensor) -> list[Beam]:
        """The best continuations of all beams (rows of logits (B, V)), best first; enough for all of them to end."""
        table = torch.log_softmax(logits.float(), dim=-1)  # (B, V)
        if not bool(torch.isfinite(table.amax(dim=-1)).all()):
            raise NumericsError("the model returned NaN or infinite logits; try a wider dtype, or check the weights")
        scores = torch.tensor([beam.score for beam in self.running], device=table.device)
        values, tokens = (table + scores[:, None]).topk(self._top_k, dim=-1)  # (B, top_k)
        num_kept = max(2, 1 + len(self._request.eos_token_ids)) * self._num_beams
        best, places = values.flatten().topk(min(num_kept, values.numel()))
        rows, chosen = places // self._top_k, tokens.flatten()[places]
        return [
            Beam(score, (*self.running[row].tokens, token), row)
            for score, row, token in zip(best.tolist(), rows.tolist(), chosen.tolist(), strict=True)
        ]

    def _select(self, candidates: list[Beam]) -> None:
        """Part candidates into those that go on and those that have ended."""
        is_last = self.length == self._longest
        eos = self._request.eos_token_ids
        ended = [is_last or beam.tokens[-1] in eos for beam in candidates]
        going_on = [beam for beam, end in zip(candidates, ended, strict=True) if not end]
        best = zip(candidates[: self._num_beams], ended, strict=False)
        self.finished += [Beam(beam.score / self.penalty(self.length), beam.tokens) for beam, end in best if end]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self._num_beams]
        self.running = going_on[: self._num_beams]

    def _can_improve(self) -> bool:
        """Whether the best running beam, at its best length, could still beat the best that has ended."""
        if not self.running or not self.finished:
            return bool(self.running)
        penalty = max(self.penalty(max(self.length, 1)), self.penalty(self._longest))
        return self.running[0].score / penalty > self.finished[0].score
