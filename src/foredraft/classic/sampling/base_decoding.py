"""Plain decoding: one token at a time, or several beams at a time."""

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

    Beams are no drafts, and nothing else in foredraft searches: the engine refuses them by name.

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
      model: a `transformers` causal LM, or any module that returns logits (B, T, V), or an object with ``.logits``,
        for token ids (B, T).
      max_gen_len: most tokens to generate; the model's context may end the output earlier.
      logits_processor: makes probabilities of logits and draws from them.
      eos_tokens_id: id or ids that end the output, [] or -1 for none; the one found is part of it.
      pad_token_id: not used, as nothing is padded.
      use_cache: keep keys and values from step to step; False reads the whole text every time.
      debug: print every step, as ids.

    Returns: the generated ids, without the prompt.
    Raises: PromptError, ContextLengthError, ConfigError, UnsupportedModelError; NumericsError and ShapeError for what
      model or processor return.
    Exactness: plain decoding itself; both values of ``use_cache`` give the same tokens, up to near-ties in half
      precision.
    Randomness: torch's global generator, by the processor's ``sample``.
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
    """Generate the likeliest output that a beam search finds.

    Source: the length penalty of Wu et al. 2016, arXiv:1609.08144: log-probabilities are divided by
    ``((min_length + length) / (min_length + 1)) ** alpha``.

    Args:
      inputs, model, max_gen_len, eos_tokens_id, pad_token_id: as for `autoregressive_generate`.
      num_beams: outputs that are kept at once.
      top_k: continuations of every beam that are looked at.
      min_length, alpha: of the length penalty; ``alpha=0`` is none.
      debug: print the beams after every step.
      tokenizer: shows text instead of ids.

    Returns: the best output's ids, without the prompt.
    Raises: as `autoregressive_generate`.
    Exactness: with ``alpha=0`` and ``top_k >= 2 * num_beams`` the output of transformers' beam search.
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
