"""Plain decoding: one token at a time, or beam search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from foredraft.classic.reader import TextReader, reader_of
from foredraft.classic.request import Request, check_least
from foredraft.classic.rounds import Decoding, ProcessorSampler
from foredraft.classic.trace import Step, begin_trace
from foredraft.classic.utils import printing
from foredraft.classic.utils.logits_processor import GreedyProcessor, LogitsProcessor
from foredraft.devices import makes_on_cpu
from foredraft.errors import ConfigError, NumericsError

__all__ = ["autoregressive_generate", "beam_search_generate"]


@dataclass(frozen=True)
class Beam:
    """One candidate output of a beam search.

    Args:
      score: log-probability; divided by the length penalty once the beam has ended.
      tokens: generated tokens.
      parent: cache row with all of these tokens but the last.
    """

    score: float
    tokens: tuple[int, ...]
    parent: int = 0


class BeamSearch:
    """Beam search over the ``num_beams`` most likely running outputs, and as many that have ended.

    An output ends with an EOS token or at the length limit. An ended output counts only if it is among the best
    ``num_beams`` of its step, as in transformers. The search ends when no running output can beat the best one that has
    ended.

    The engine does not support beam search and refuses it by name, because beams are not drafts.

    Args:
      reader: reader of the model, with a cache.
      top_k: number of continuations per beam to consider, at most V.
      min_length, alpha: parameters of the length penalty; see `penalty`.

    Raises: ConfigError if ``min_length`` is not above -1.
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
            raise ConfigError(f"min_length is {min_length}; it must be above -1, or the length penalty is undefined")
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
        """The most likely ended output; empty if no output has ended."""
        return self.finished[0].tokens if self.finished else ()

    def penalty(self, length: int) -> float:
        """Return the length penalty: the divisor of the log-probability of an output of ``length`` tokens."""
        return float(((self._min_length + length) / (self._min_length + 1.0)) ** self._alpha)

    def steps(self) -> Iterator[Step]:
        """Extend all beams by one token at a time, with one forward pass per step."""
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
        """Return logits (B, V) after the running beams."""
        prompt = self._request.prompt
        if not self.length:
            return self._reader.read(prompt)
        texts = [(*prompt, *beam.tokens) for beam in self.running]
        return self._reader.read_beams(texts, [beam.parent for beam in self.running])

    def _candidates(self, logits: Tensor) -> list[Beam]:
        """Return the best continuations of all beams from logits (B, V), best first, enough even if many of them
        end."""
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
        """Divide candidates into running and ended outputs."""
        is_last = self.length == self._longest
        eos = self._request.eos_token_ids
        ended = [is_last or beam.tokens[-1] in eos for beam in candidates]
        going_on = [beam for beam, end in zip(candidates, ended, strict=True) if not end]
        best = zip(candidates[: self._num_beams], ended, strict=False)
        self.finished += [Beam(beam.score / self.penalty(self.length), beam.tokens) for beam, end in best if end]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self._num_beams]
        self.running = going_on[: self._num_beams]

    def _can_improve(self) -> bool:
        """Return whether the best running beam, at its best length, could still beat the best one that has ended."""
        if not self.running or not self.finished:
            return bool(self.running)
        penalty = max(self.penalty(max(self.length, 1)), self.penalty(self._longest))
        return self.running[0].score / penalty > self.finished[0].score


@torch.no_grad()
@makes_on_cpu
def autoregressive_generate(
    inputs: Sequence[int],
    model: Module,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008
    eos_tokens_id: int | Iterable[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
) -> list[int]:
    """Generate one token at a time: the speculative loop with empty drafts.

    Args:
      inputs: token ids of one prompt.
      model: a `transformers` causal LM, or any module that returns logits (B, T, V), or an object with ``.logits``, for
        token ids (B, T).
      max_gen_len: largest number of tokens to generate; the model's context may end the output earlier.
      logits_processor: processor that converts logits to probabilities and samples from them.
      eos_tokens_id: id or ids that end the output; [] or -1 for none. The EOS token is part of the output.
      pad_token_id: ignored, because nothing is padded.
      use_cache: True to keep keys and values from step to step; False to read the whole text every time.
      debug: True to print every step, with token ids.

    Returns: the generated ids, without the prompt.
    Raises: PromptError, ContextLengthError, ConfigError, UnsupportedModelError; NumericsError and ShapeError for
      invalid output of the model or the processor.
    Exactness: the function is plain decoding. Both values of ``use_cache`` give the same tokens, up to near-ties in
      half
    precision.
    Randomness: torch's global generator, through the processor's ``sample``.
    """
    reader = reader_of(model, keeps_cache=use_cache)
    request = Request.of(inputs, reader.model, max_gen_len, eos_tokens_id)
    decoding = Decoding(
        request,
        reader,
        ProcessorSampler(logits_processor, reader.model.vocab_size),
        begin_trace("autoregressive_generate", len(request.prompt)),
        on_step=printing.printer(request.prompt, title="Autoregressive Step") if debug else None,
    )
    return decoding.run()


@torch.no_grad()
@makes_on_cpu
def beam_search_generate(
    inputs: Sequence[int],
    model: Module,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: int | Iterable[int] = 1,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """Generate the most likely output that a beam search finds.

    Source: the length penalty of Wu et al. 2016, arXiv:1609.08144. Log-probabilities are divided by
      ``((min_length + length) / (min_length + 1)) ** alpha``.

    Args:
      inputs, model, max_gen_len, eos_tokens_id, pad_token_id: see `autoregressive_generate`.
      num_beams: number of outputs that are extended in parallel.
      top_k: number of continuations per beam to consider.
      min_length, alpha: parameters of the length penalty; ``alpha=0`` for none.
      debug: True to print the beams after every step.
      tokenizer: tokenizer for ``debug``; None prints ids.

    Returns: the ids of the best output, without the prompt.
    Raises: the errors of `autoregressive_generate`.
    Exactness: with ``alpha=0`` and ``top_k >= 2 * num_beams`` the output equals that of transformers' beam search.
    Randomness: none.
    """
    check_least("num_beams", num_beams, 1)
    check_least("top_k", top_k, 1)
    reader = reader_of(model, keeps_cache=True)
    request = Request.of(inputs, reader.model, max_gen_len, eos_tokens_id)
    search = BeamSearch(request, reader, num_beams, min(top_k, reader.model.vocab_size), min_length, alpha)
    trace = begin_trace("beam_search_generate", len(request.prompt))
    for step in search.steps():
        trace.steps.append(step)
        if debug:
            shown = [[(beam.score, beam.tokens) for beam in beams] for beams in (search.running, search.finished)]
            printing.beam_search_step(search.length, shown[0], shown[1], tokenizer)
    return list(search.best)
