"""From a prompt to the members of a batch: one per sample, each with a law, a seed and an end of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from typing import TYPE_CHECKING

from foretoken.engine.batch import Member
from foretoken.engine.sequence import Sequence
from foretoken.engine.stopping import StopChecker
from foretoken.law.noise import fresh_seed, mix
from foretoken.law.sampling import SamplingLaw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.config.engine import EngineConfig
    from foretoken.config.sampling import SamplingParams
    from foretoken.model.lm import CausalLM


class Requests:
    """Makes the rows of requests.

    Args:
      target: whose law the rows keep.
      max_model_len: tokens of the longest row.
      eos_token_ids: tokens that end a row.
      tokenizer: needed for stop strings only.
      config: of the engine.
    """

    def __init__(
        self,
        target: CausalLM,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
    ) -> None:
        self._target = target
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._config = config
        self._ids = count()  # unique also when requests are added from several threads

    def new_id(self) -> str:
        """A name for a request that comes without one."""
        return f"request-{next(self._ids)}"

    def first_member(
        self, prompt: list[int], params: SamplingParams, request_id: str, history_ids: Seq[int] | None
    ) -> Member:
        """The first sample of a prompt, with the other ones as its forks; sample i of n has a seed of its own."""
        seed = fresh_seed() if params.seed is None else params.seed
        first, *others = (
            self._member(prompt, self._law(params, prompt, history_ids, mix(seed, index)), request_id, index)
            for index in range(params.n)
        )
        first.forks = others
        return first

    def _law(self, params: SamplingParams, prompt: list[int], history_ids: Seq[int] | None, seed: int) -> SamplingLaw:
        law = SamplingLaw(
            params,
            vocab_size=self._target.vocab_size,
            eos_token_ids=self._eos_token_ids,
            prompt_ids=prompt,
            history_ids=history_ids,
            device=self._target.device,
        )
        law.seed = seed
        law.contains_faults = self._config.contains_faults
        return law

    def _member(self, prompt: list[int], law: SamplingLaw, request_id: str, index: int) -> Member:
        params = law.params
        budget = self._max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        row = Sequence(
            id=next(self._ids),
            request_id=request_id,
            index=index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            seed=law.seed,
            law=law,
            max_length=min(budget, self._max_model_len),
        )
        checker = StopChecker(params, self._eos_token_ids, len(prompt), row.max_length, self._tokenizer)
        row.text = checker.text
        return Member(row, checker)
