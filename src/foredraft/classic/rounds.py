"""The decoding loop of every classic function: propose, verify, accept, emit, observe.

Cache, acceptance rule, stopping, prompt checks and length policies are the same as in the engine. The loop is
different, because the described interface cannot run in the engine. A user's processor is called once per accepted
token and draws from torch's global generator. The engine's noise is keyed, so `torch.manual_seed` would have no effect
there. ``use_cache=False`` reads the whole text every time, any module may be the model, and the first forward pass
reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.accept import Verdict, rejection
from foredraft.classic.reader import TextReader
from foredraft.classic.request import Request
from foredraft.classic.trace import DraftedToken, Step, Trace
from foredraft.errors import ConfigError, NumericsError, ShapeError
from foredraft.tree import DraftTree

PROBS_SUM_TOLERANCE = 1e-3  # for user processors in half precision; foredraft's own are right up to rounding


class ProcessorSampler:
    """A checked user processor: logits -> probabilities -> token.

    The processor gets a copy of one row (1, V) at a time, in float32 or wider.

    Args:
      processor: object with ``processor(logits) -> probs`` and ``processor.sample(probs) -> token``.
      vocab_size: V.
    """

    def __init__(self, processor: Any, vocab_size: int) -> None:
        if not callable(processor) or not callable(getattr(processor, "sample", None)):
            raise ConfigError(
                f"logits_processor is {processor!r}; use an object with __call__(logits) and sample(probs), such as "
                "GreedyProcessor()"
            )
        self._processor = processor
        self._name = type(processor).__name__
        self._vocab_size = vocab_size
        self.draws_from_probs = bool(getattr(processor.sample, "draws_from_probs", False))
        self.temperature = float(getattr(processor, "temperature", None) or 1.0)

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities (V,) of logits (V,) of any float dtype.

        Raises: NumericsError or ShapeError that names the processor, or the model if its logits are wrong.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probs = self._processor(logits.to(dtype, copy=True)[None])
        if not isinstance(probs, Tensor) or probs.shape != (1, self._vocab_size):
            shape = tuple(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
            raise ShapeError(
                f"{self._name} returned {shape} for logits of shape (1, {self._vocab_size}); it must return "
                "probabilities of the same shape"
            )
        found = probs.detach()[0]
        total = float(found.sum())
        if not abs(total - 1.0) <= PROBS_SUM_TOLERANCE or bool((found < 0).any()):
            raise self._failure(logits, found, total)
        return found

    def _failure(self, logits: Tensor, probs: Tensor, total: float) -> NumericsError:
        if bool(torch.isnan(logits).any()) or bool((logits == torch.inf).any()):
            return NumericsError("the model returned NaN or infinite logits; try a wider dtype, or check the weights")
        what = "NaN" if total != total else f"values of at least {float(probs.min()):.4g} that sum to {total:.4g}"
        return NumericsError(f"{self._name} returned {what}; its probabilities must be 0 or more and sum to 1")

    def sample(self, probs: Tensor) -> int:
        """Return the processor's token for a distribution (V,).

        Raises: ShapeError for anything but one token; NumericsError for a token outside the vocabulary.
        """
        token = self._processor.sample(probs[None])
        if not isinstance(token, Tensor) or token.numel() != 1:
            shape = tuple(token.shape) if isinstance(token, Tensor) else type(token).__name__
            raise ShapeError(
                f"{self._name}.sample returned {shape} for probabilities (1, V); it must return one token, (1, 1)"
            )
        chosen = int(token)
        if not 0 <= chosen < self._vocab_size:
            raise NumericsError(f"{self._name}.sample returned token {chosen}, outside of 0..{self._vocab_size - 1}")
        return chosen


class TorchNoise:
    """Random numbers for the acceptance rules from torch's global generator, in the order of use.

    Args:
      sampler: sampler that draws bonus and recovered tokens with the user's ``sample``.
      target_probs: function that returns the target's distribution (V,) after a node of the draft.
      is_adjusted: False to draw from the target's distribution instead of the residual, which is lossy.

    Randomness: one ``torch.rand`` per tested token, then one call of the processor's ``sample``. `torch.manual_seed`
      makes both repeatable.
    """

    def __init__(
        self, sampler: ProcessorSampler, target_probs: Callable[[int], Tensor], *, is_adjusted: bool = True
    ) -> None:
        self._sampler = sampler
        self.target_probs = target_probs
        self._is_adjusted = is_adjusted
        self.uniforms: list[float] = []

    def uniform(self, depth: int, sibling: int) -> float:
        self.uniforms.append(float(torch.rand((), dtype=torch.float64)))
        return self.uniforms[-1]

    def draw(self, depth: int, probs: Tensor) -> int:
        target = self.target_probs(depth)  # drafts are chains, so node and depth are the same number
        return self._sampler.sample(probs.to(target.dtype) if self._is_adjusted else target)


OnStep = Callable[[Step, list[int]], None]
"""Function that is called after every step with the step and the whole text."""


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens.

    Args:
      tokens: proposed tokens.
      probs: distributions (V,) from which the tokens were drawn; empty if a storage proposed the tokens.
      is_sample: True if the tokens are samples of these distributions, so that the rejection rule may use them.
      normalised_entropy: see `Step`.
    """

    tokens: tuple[int, ...] = ()
    probs: tuple[Tensor, ...] = ()
    is_sample: bool = False
    normalised_entropy: float | None = None

    def tree(self, pending: int) -> DraftTree:
        probs = torch.stack(self.probs) if self.is_sample and self.probs else None
        return DraftTree.chain(pending, self.tokens, probs)


class Proposer(Protocol):
    """A source of drafts."""

    def propose(self, text: Sequence[int], budget: int) -> Draft:
        """Return at most ``budget`` tokens after the text."""
        ...

    def observe(self, text: Sequence[int], target_probs: Sequence[Tensor]) -> None:
        """Learn from the new tokens at the end of the text. ``target_probs`` contains the distribution (V,) of each."""
        ...


@dataclass(frozen=True)
class Decoding:
    """One call of a classic function: request, models and observers.

    Args:
      request: prompt and limits.
      target: reader of the target.
      sampler: the user's processor.
      trace: record to which every step is added.
      proposer: source of drafts; None for plain decoding, where every draft is empty.
      first_target: True to emit the first token without a draft.
      is_adjusted: False to replace the residual by the target's distribution, which is lossy.
      on_step: function that is called after every step; None for none.

    Exactness: lossless for any proposer that does not use the target's random choices. Tokens are accepted by
    `foredraft.accept.rejection`.
    """

    request: Request
    target: TextReader
    sampler: ProcessorSampler
    trace: Trace
    proposer: Proposer | None = None
    first_target: bool = False
    is_adjusted: bool = True
    on_step: OnStep | None = None

    def run(self) -> list[int]:
        """Return the output tokens, an EOS token included."""
        text = list(self.request.prompt)
        checker = self.request.new_checker()
        is_finished = len(text) >= self.request.max_length
        while not is_finished:
            result = self._round(text)
            emitted = []
            for token in result.tokens:
                emitted.append(token)
                is_finished = checker.check(token) is not None
                if is_finished:
                    break
            step = result.step(len(text), len(emitted))
            text += emitted
            if self.proposer is not None:
                self.proposer.observe(text, result.target_probs[: len(emitted)])
            self.trace.steps.append(step)
            if self.on_step is not None:
                self.on_step(step, text)
        return text[len(self.request.prompt) :]

    def _round(self, text: list[int]) -> _Round:
        """Draft after the text, run the target over text and draft, and apply the acceptance rule."""
        times = [perf_counter()]
        is_first = len(text) == len(self.request.prompt)
        budget = 0 if self.first_target and is_first else self.request.max_length - len(text) - 1
        draft = Draft() if self.proposer is None or budget < 1 else self.proposer.propose(text, budget)
        times.append(perf_counter())
        logits = self.target.read([*text, *draft.tokens], len(draft.tokens) + 1)
        times.append(perf_counter())
        target_probs = cache(lambda node: self.sampler.probs(logits[node]))
        noise = TorchNoise(self.sampler, target_probs, is_adjusted=self.is_adjusted)
        verdict = rejection(draft.tree(text[-1]), target_probs, noise)
        visited = [target_probs(node) for node in verdict.path]
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        return _Round(draft, verdict, visited, noise.uniforms, self.is_adjusted, seconds)


@dataclass(frozen=True)
class _Round:
    """A draft and its outcome, before the output is cut. ``target_probs[i]`` is the distribution of token i."""

    draft: Draft
    verdict: Verdict
    target_probs: list[Tensor]
    uniforms: list[float]
    is_adjusted: bool
    seconds: list[float]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Accepted tokens and the target's own token."""
        return (*self.draft.tokens[: self.verdict.num_accepted], self.verdict.next_token)

    def step(self, position: int, num_emitted: int) -> Step:
        """Return the step that emits ``num_emitted`` tokens after a text of ``position`` tokens."""
        num_accepted = self.verdict.num_accepted
        is_cut = num_emitted <= num_accepted
        was_rejected = num_accepted < len(self.draft.tokens)
        return Step(
            position=position,
            gamma=len(self.draft.tokens),
            normalised_entropy=self.draft.normalised_entropy,
            drafts=tuple(self._drafted(index, position, num_emitted) for index in range(len(self.draft.tokens))),
            accepted=min(num_accepted, num_emitted),
            final_token=None if is_cut else self.verdict.next_token,
            is_adjusted=self.draft.is_sample and was_rejected and self.is_adjusted and not is_cut,
            draft_seconds=self.seconds[0],
            verify_seconds=self.seconds[1],
            accept_seconds=self.seconds[2],
        )

    def _drafted(self, index: int, position: int, num_emitted: int) -> DraftedToken:
        token = self.draft.tokens[index]
        is_tested = index < min(len(self.target_probs), num_emitted)
        return DraftedToken(
            position=position + index,
            token=token,
            draft_prob=float(self.draft.probs[index][token]) if self.draft.probs else None,
            target_prob=float(self.target_probs[index][token]) if is_tested else None,
            uniform=self.uniforms[index] if is_tested and self.draft.is_sample else None,
            accepted=index < self.verdict.num_accepted if is_tested else None,
        )
