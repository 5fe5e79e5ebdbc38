"""The round of every classic function: propose, verify, accept, emit, observe.

Cache, acceptance rule, stopping, prompt checks and length policies are the engine's; its loop is not. What is described
cannot run in it: a user's processor is called once per accepted token and draws from torch's global generator (the
engine's noise is keyed, so `torch.manual_seed` would repeat nothing), ``use_cache=False`` reads the whole text every
time, any module may be the model, and the first forward reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from foretoken.accept.rules import Verdict, rejection
from foretoken.classic.processed import ProcessedLaw, TorchNoise
from foretoken.classic.reader import TextReader
from foretoken.classic.request import Request
from foretoken.classic.trace import DraftedToken, Step, Trace
from foretoken.tree import DraftTree

OnStep = Callable[[Step, list[int]], None]
"""Is shown every step, and the whole text after it."""


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens.

    Args:
      tokens: what is proposed.
      laws: the law (V,) each was drawn from; empty where a storage proposed them.
      is_sample: whether the tokens are draws from these laws, so that the rejection rule may use them.
      normalised_entropy: see `Step`.
    """

    tokens: tuple[int, ...] = ()
    laws: tuple[Tensor, ...] = ()
    is_sample: bool = False
    normalised_entropy: float | None = None

    def tree(self, pending: int) -> DraftTree:
        probs = torch.stack(self.laws) if self.is_sample and self.laws else None
        return DraftTree.chain(pending, self.tokens, probs)


class Proposer(Protocol):
    """Where drafts come from."""

    def propose(self, text: Sequence[int], budget: int) -> Draft:
        """At most ``budget`` tokens after the text."""
        ...

    def observe(self, text: Sequence[int], laws: Sequence[Tensor]) -> None:
        """Learn from the new tokens at the end of the text: one law (V,) of the target for each of them."""
        ...


@dataclass(frozen=True)
class Decoding:
    """One call: what is decoded, by whom, and who watches.

    Args:
      request: prompt and limits.
      target: reads the text.
      law: the user's processor.
      proposer: where drafts come from; None decodes plainly: every draft is empty.
      first_target: let the target say the first token alone.
      is_adjusted: False replaces the residual by the target's law: lossy.
      trace: takes in every step.
      on_step: is shown every step.

    Exactness: lossless for any proposer that does not look at the target's choices: tokens are accepted by
    `foretoken.accept.rules.rejection`.
    """

    request: Request
    target: TextReader
    law: ProcessedLaw
    trace: Trace
    proposer: Proposer | None = None
    first_target: bool = False
    is_adjusted: bool = True
    on_step: OnStep | None = None

    def run(self) -> list[int]:
        """The output tokens, an end-of-sequence token included."""
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
                self.proposer.observe(text, result.laws[: len(emitted)])
            self.trace.steps.append(step)
            if self.on_step is not None:
                self.on_step(step, text)
        return text[len(self.request.prompt) :]

    def _round(self, text: list[int]) -> _Round:
        """Draft after the text, read text and draft, and let the acceptance rule decide."""
        times = [perf_counter()]
        is_first = len(text) == len(self.request.prompt)
        budget = 0 if self.first_target and is_first else self.request.max_length - len(text) - 1
        draft = Draft() if self.proposer is None or budget < 1 else self.proposer.propose(text, budget)
        times.append(perf_counter())
        logits = self.target.read([*text, *draft.tokens], len(draft.tokens) + 1)
        times.append(perf_counter())
        law_at = cache(lambda node: self.law.probs(logits[node]))
        noise = TorchNoise(self.law, law_at, is_adjusted=self.is_adjusted)
        verdict = rejection(draft.tree(text[-1]), law_at, noise)
        laws = [law_at(node) for node in verdict.path]
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        return _Round(draft, verdict, laws, noise.uniforms, self.is_adjusted, seconds)


@dataclass(frozen=True)
class _Round:
    """A draft and its outcome, before the output is cut. ``laws[i]`` is the target's law of token i."""

    draft: Draft
    verdict: Verdict
    laws: list[Tensor]
    uniforms: list[float]
    is_adjusted: bool
    seconds: list[float]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Accepted tokens and the target's own."""
        return (*self.draft.tokens[: self.verdict.num_accepted], self.verdict.next_token)

    def step(self, position: int, num_emitted: int) -> Step:
        """The step that emits this many tokens after a text of that length."""
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
        is_tested = index < min(len(self.laws), num_emitted)
        return DraftedToken(
            position=position + index,
            token=token,
            draft_prob=float(self.draft.laws[index][token]) if self.draft.laws else None,
            target_prob=float(self.laws[index][token]) if is_tested else None,
            uniform=self.uniforms[index] if is_tested and self.draft.is_sample else None,
            accepted=index < self.verdict.num_accepted if is_tested else None,
        )
