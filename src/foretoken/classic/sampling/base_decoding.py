"""Plain decoding: one token at a time, or several beams at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module

from foretoken.classic.processed import ProcessedLaw
from foretoken.classic.reader import reader_of
from foretoken.classic.request import Request, check_least
from foretoken.classic.rounds import Decoding
from foretoken.classic.sampling.beams import BeamSearch
from foretoken.classic.trace import begin_trace
from foretoken.classic.utils import printing
from foretoken.classic.utils.logits_processor import GreedyProcessor, LogitsProcessor
from foretoken.model.default_device import makes_on_cpu

__all__ = ["autoregressive_generate", "beam_search_generate"]


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
        ProcessedLaw(logits_processor, reader.model.vocab_size),
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
