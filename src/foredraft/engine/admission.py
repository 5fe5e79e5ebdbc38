"""Rows of requests as they arrive, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from transformers import PreTrainedTokenizerBase

from foredraft.config.sampling import SamplingParams
from foredraft.config.structured import StructuredOutputs
from foredraft.engine.row import Prediction, Row, as_ids, check_prompt
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.sampling.distribution import Sampler
from foredraft.sampling.noise import fresh_seed, mix
from foredraft.structured.grammars import Grammars


@dataclass(frozen=True)
class Admission:
    """Makes the rows of requests.

    Args:
      target: the model.
      eos_token_ids: tokens that end a row.
      tokenizer: needed for stop strings only.
      max_model_len: prompt and output together never exceed it.
      most_planned: prompt and output together of a row for which memory is planned; None for `max_model_len`. A
        request that does not limit its output ends there.
      contains_faults: see `EngineConfig`.
      grammars: for what outputs must match.
      ids: of rows; unique also when requests are added from several threads.
    """

    target: CausalLM
    eos_token_ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    most_planned: int | None
    contains_faults: bool
    grammars: Grammars
    ids: Iterator[int] = field(default_factory=count)

    def rows(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        history_ids: Sequence[int] | None,
        output_ids: Sequence[Sequence[int]],
        longest: int = 0,
    ) -> list[Row]:
        """The ``params.n`` rows of a request; see `Engine.add_request`."""
        prompt, target = as_ids(prompt_ids), self.target
        if output_ids and len(output_ids) != params.n:
            raise ConfigError(f"output_ids has {len(output_ids)} lists for n={params.n} samples; give one for each")
        offset = target.offset_of(max(len(prompt), longest))
        context = target.long_context if offset else target.context_length
        limit = self.max_model_len if context is None else min(self.max_model_len, context)
        reason = target.beyond_context if limit in (target.context_length, target.long_context) else ""
        check_prompt(prompt, target.num_embeddings, limit, num_new_tokens=params.max_tokens != 0, reason=reason)
        if params.max_tokens is not None:
            wanted = len(prompt) + params.max_tokens
        else:
            wanted = limit if self.most_planned is None else max(self.most_planned, len(prompt) + 1)
        request_id = f"request-{next(self.ids)}" if request_id is None else request_id
        seed = fresh_seed() if params.seed is None else params.seed
        prediction = self._prediction(params, len(prompt))
        rows = []
        for index in range(params.n):
            sampler = self._sampler(params, prompt, history_ids, mix(seed, index))
            row = self._row(prompt, sampler, request_id, index, min(wanted, limit))
            row.prediction = None if prediction is None else prediction.copy()
            row.offset = offset
            rows.append(row)
        for row, output in zip(rows, output_ids, strict=False):
            self._continue(row, as_ids(output))
        return rows

    def _continue(self, row: Row, output_ids: list[int]) -> None:
        """Let a row have said something already, which is replayed before it goes on.

        Raises: PromptError for ids outside the vocabulary; ConfigError for an output that had ended before, or that its
          grammar does not allow.
        """
        if not output_ids:
            return
        check_prompt(output_ids, self.target.vocab_size, None)
        for place, token in enumerate(output_ids, 1):
            if row.is_finished:
                raise ConfigError(
                    f"output_ids has {len(output_ids)} tokens, but the output ends with the first {place - 1} "
                    f"({row.finish_reason}); leave out what comes after"
                )
            if (finish := row.checker.check(token)) is not None:
                row.finish_reason, row.stop_reason = finish.reason, finish.cause
        row.extend(output_ids)
        if row.sampler.matching is not None and row.sampler.matching.fault is not None:
            raise ConfigError(f"output_ids cannot be continued: {row.sampler.matching.fault}")
        row.num_replayed = len(output_ids)

    def _prediction(self, params: SamplingParams, start: int) -> Prediction | None:
        given = params.prediction
        if not given:
            return None
        if isinstance(given, str):
            raise ConfigError(f"prediction {given[:40]!r} was not resolved to tokens; give token ids, or a tokenizer")
        outside = [token for token in given if token >= self.target.vocab_size]
        if outside:
            raise ConfigError(
                f"prediction holds token ids {outside[:8]}, outside the vocabulary, 0..{self.target.vocab_size - 1}; "
                "leave them out"
            )
        return Prediction(given, start)

    def _sampler(
        self, params: SamplingParams, prompt: list[int], history_ids: Sequence[int] | None, seed: int
    ) -> Sampler:
        wanted = params.structured_outputs
        sampler = Sampler(
            params,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=prompt,
            history_ids=history_ids,
            device=self.target.device,
            matching=None if wanted is None else self.grammars.matching(StructuredOutputs.of(wanted)),
        )
        sampler.seed, sampler.contains_faults = seed, self.contains_faults
        return sampler

    def _row(self, prompt: list[int], sampler: Sampler, request_id: str, index: int, max_length: int) -> Row:
        return Row(
            id=next(self.ids),
            request_id=request_id,
            index=index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=sampler.params,
            seed=sampler.seed,
            sampler=sampler,
            max_length=max_length,
            checker=StopChecker(sampler.params, self.eos_token_ids, len(prompt), max_length, self.tokenizer),
        )
