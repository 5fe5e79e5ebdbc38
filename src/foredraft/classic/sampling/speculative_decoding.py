"""Speculative decoding with a draft model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from foredraft.classic.reader import Readable, TextReader, reader_of
from foredraft.classic.request import Request, check_least
from foredraft.classic.rounds import Decoding, Draft, ProcessorSampler
from foredraft.classic.trace import begin_trace
from foredraft.classic.utils import printing
from foredraft.classic.utils.logits_processor import GreedyProcessor, LogitsProcessor
from foredraft.devices import makes_on_cpu
from foredraft.loading.pairing import check_vocab_sizes
from foredraft.methods.lengths import Egag, normalised_entropy
from foredraft.model.lm import fit_vocabulary
from foredraft.sampling.precision import double_device, for_double

__all__ = ["max_fn", "speculative_generate"]


def max_fn(x: Tensor) -> Tensor:
    """Return norm(max(x, 0)) over the last dimension. For x = p - q it is the distribution of the token after a
    rejection.

    Rows without a positive entry become zeros instead of NaN. In such rows p equals q, and nothing is ever rejected.
    """
    positive = x.clamp(min=0)
    total = positive.sum(dim=-1, keepdim=True)
    return positive / total.where(total > 0, 1.0)


@torch.no_grad()
@makes_on_cpu
def speculative_generate(
    inputs: Sequence[int],
    drafter: Module,
    target: Module,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GreedyProcessor(),  # noqa: B008
    max_gen_len: int = 40,
    eos_tokens_id: int | Iterable[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
) -> tuple[list[int], float]:
    """Generate with a small model that drafts, and a target that verifies whole drafts at once.

    Source: Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. EGAG: TbK0ng/Speculative-
    Decoding, see `foredraft.methods.lengths`.

    Args:
      inputs: token ids of one prompt.
      drafter, target: `transformers` causal LMs with one tokenizer, or any modules that return logits (B, T, V), or an
        object with ``.logits``, for token ids (B, T). The vocabularies of drafter and target may be padded differently.
      tokenizer: tokenizer for ``debug``; None prints ids.
      gamma: tokens per draft.
      use_egag: True to choose the draft length in every step by the entropy of the drafter's distribution.
      gamma_min, gamma_max, egag_ema_beta: limits of that length (``gamma`` if ``gamma_max`` is None), and weight of its
        past.
      logits_processor: processor that converts the logits of both models to probabilities and samples from them.
      max_gen_len: largest number of tokens to generate; the target's context may end the output earlier.
      eos_tokens_id: id or ids that end the output; [] or -1 for none. The EOS token is part of the output.
      pad_token_id: ignored, because nothing is padded.
      use_cache: True to keep keys and values from step to step; False to read the whole text every time.
      skip_sample_adjustment: True to draw from the target's distribution after a rejection instead of the residual.
        Sampling from the target's distribution is lossy and gives a warning.
      first_target: True to emit the first token without a draft.
      debug: True to print every step.

    Returns: the generated ids without the prompt, and accepted / drafted tokens (0.0 if nothing was drafted).
    Raises: PromptError, ContextLengthError, ConfigError, UnsupportedModelError, TokenizerMismatchError; NumericsError
      and ShapeError for invalid output of a model or the processor.
    Exactness: lossless. The output has the distribution of `autoregressive_generate` with the same processor. With a
      greedy processor the output is the same, too. With ``skip_sample_adjustment`` the function is lossy.
    Randomness: torch's global generator, through the processor's ``sample`` for drafts and final tokens, and
      ``torch.rand`` for the acceptance tests.
    """
    check_least("gamma", gamma, 0)
    egag = None
    if use_egag or gamma_max is not None:
        egag = Egag(gamma if gamma_max is None else gamma_max, "paper", gamma_min, egag_ema_beta)
    if skip_sample_adjustment:
        warnings.warn(
            "skip_sample_adjustment draws the token after a rejection from the target's distribution instead of the "
            "residual: the output no longer has the target's distribution",
            UserWarning,
            stacklevel=4,
        )
    target_reader = reader_of(target, keeps_cache=use_cache)
    draft_reader = reader_of(drafter, keeps_cache=use_cache)
    target_model, draft_model = target_reader.model, draft_reader.model
    num_tokens = len(tokenizer) if isinstance(tokenizer, Sized) else None
    check_vocab_sizes(target_model.vocab_size, draft_model.vocab_size, target_model.name, draft_model.name, num_tokens)
    request = Request.of(inputs, target_model, max_gen_len, eos_tokens_id)
    sampler = ProcessorSampler(logits_processor, target_model.vocab_size)
    trace = begin_trace("speculative_generate", len(request.prompt))
    decoding = Decoding(
        request,
        target_reader,
        sampler,
        trace,
        ModelProposer(draft_reader, sampler, target_model, gamma, egag if use_egag else None),
        first_target=first_target,
        is_adjusted=not skip_sample_adjustment,
        on_step=printing.printer(request.prompt, tokenizer) if debug else None,
    )
    return decoding.run(), trace.acceptance_rate


class ModelProposer:
    """Drafts of a causal language model, sampled by the user's processor.

    Args:
      reader: reader of the drafter.
      sampler: the user's processor.
      target: target model, which determines the vocabulary and device of the distributions.
      gamma: tokens per draft without ``egag``.
      egag: policy that chooses the draft length by the entropy of the drafter's distribution. The entropy is taken at
        the processor's temperature and before its filter.
    """

    def __init__(
        self, reader: TextReader, sampler: ProcessorSampler, target: Readable, gamma: int, egag: Egag | None = None
    ) -> None:
        self._reader = reader
        self._sampler = sampler
        self._target = target
        self._gamma = gamma
        self._egag = egag
        self._ema: float | None = None

    def propose(self, text: Sequence[int], budget: int) -> Draft:
        """Draw tokens one by one. The last token is never fed, so it may be one beyond the drafter's context."""
        context = self._reader.model.context_length
        reach = min(budget, sys.maxsize if context is None else context - len(text) + 1)
        if reach < 1 or (self._egag is None and self._gamma < 1):
            return Draft()
        logits = self._reader.read(text)[0]
        entropy, length = self._length(logits)
        tokens: list[int] = []
        draft_probs: list[Tensor] = []
        for index in range(min(length, reach)):
            if index:
                logits = self._reader.read([*text, *tokens])[0]
            probs = self._sampler.probs(fit_vocabulary(logits, self._target.vocab_size))
            tokens.append(self._sampler.sample(probs))
            draft_probs.append(probs.to(double_device(self._target.device)))
        return Draft(tuple(tokens), tuple(draft_probs), self._sampler.draws_from_probs, entropy)

    def _length(self, logits: Tensor) -> tuple[float | None, int]:
        """Return the normalised entropy, if EGAG is used, and the length of the draft."""
        if self._egag is None:
            return None, self._gamma
        entropy = normalised_entropy(torch.softmax(for_double(logits).double() / self._sampler.temperature, dim=-1))
        length, self._ema = self._egag.length(entropy, self._ema)
        return entropy, length

    def observe(self, text: Sequence[int], target_probs: Sequence[Tensor]) -> None: ...
