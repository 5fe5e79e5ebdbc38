"""Who generates: this library's engine, and transformers' own `generate`, behind one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from foretoken.config.sampling import SamplingParams
from foretoken.engine import governing
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine, EngineConfig
from foretoken.engine.sequence import Sequence
from foretoken.engine.stats import SequenceStats, StepTrace
from foretoken.model.lm import CausalLM


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, for every arm alike."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def label(self) -> str:
        if self.is_greedy:
            return "greedy"
        return f"T={self.temperature:g}" + (f" top-p={self.top_p:g}" if self.top_p < 1 else "")

    def params(self, max_new_tokens: int) -> SamplingParams:
        """The same settings as the engine's parameters."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=max_new_tokens,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Run:
    """The results of one arm on one prompt.

    Decoding is what follows the first emission: its time and its tokens alone are compared, so that the cost of
    prompts is left out. An arm that emits several tokens at first has that many fewer to account for.

    Args:
      token_ids: of the output.
      num_first: how many of them came with the first emission.
      first_seconds: from the request to the first emission, prompt and drafter's prompt included.
      decode_seconds: from there to the end.
      stats: the engine's counters, None for other arms.
      step_seconds: between one emission and the next; they add up to ``decode_seconds``.
      trace: the engine's steps, one by one.
    """

    token_ids: tuple[int, ...]
    num_first: int
    first_seconds: float
    decode_seconds: float
    stats: SequenceStats | None = None
    step_seconds: tuple[float, ...] = ()
    trace: tuple[StepTrace, ...] = ()

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - self.num_first

    @property
    def seconds_per_token(self) -> float:
        """Seconds per decoded token; NaN when the first emission was all."""
        return self.decode_seconds / self.num_decoded if self.num_decoded > 0 else float("nan")


class Arm(ABC):
    """One way to generate."""

    name: str

    @abstractmethod
    def run(self, prompt_ids: Seq[int], max_new_tokens: int, sampling: Sampling) -> Run:
        """Continue one prompt."""


@dataclass
class _Emissions:
    """The times at which tokens came, and how many."""

    started: float = field(default_factory=perf_counter)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, count: int) -> None:
        self.times.append(perf_counter())
        self.counts.append(count)

    def as_run(self, token_ids: Seq[int], stats: SequenceStats | None = None) -> Run:
        first, last = self.times[0], self.times[-1]
        steps = tuple(later - earlier for earlier, later in pairwise(self.times))
        return Run(tuple(token_ids), self.counts[0], first - self.started, last - first, stats, steps)


class EngineArm(Arm):
    """This library. The engine and its cache live as long as the arm, as they do in `LLM`.

    Args:
      config: of the engine; one row at a time by default.
      is_governed: whether measured costs decide how much is drafted.
    """

    def __init__(
        self,
        name: str,
        target: CausalLM,
        drafter: Drafter,
        eos_token_ids: Iterable[int] = (),
        config: EngineConfig | None = None,
        *,
        is_governed: bool = False,
    ) -> None:
        self.name = name
        self.engine = Engine(
            target,
            drafter,
            config or EngineConfig(max_num_seqs=1),
            eos_token_ids=eos_token_ids,
            governor=governing.new_governor(target, drafter) if is_governed else None,
        )

    def run(self, prompt_ids: Seq[int], max_new_tokens: int, sampling: Sampling) -> Run:
        emissions = _Emissions()
        (row,) = self.engine.add_request(prompt_ids, sampling.params(max_new_tokens))
        while not row.is_finished:
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                emissions.add(len(output.token_ids))
        return replace(emissions.as_run(row.output_ids, row.stats), trace=tuple(row.trace))

    def run_batch(self, prompts: Seq[Seq[int]], max_new_tokens: int, sampling: Sampling) -> tuple[int, float]:
        """All prompts as rows of one batch: tokens and seconds of the steps that decode.

        Needs ``max_num_seqs`` of as many rows. Every row has entered before the time starts.
        """
        _, num_tokens, seconds = self.decode_batch(prompts, max_new_tokens, sampling)
        return num_tokens, seconds

    def decode_batch(
        self, prompts: Seq[Seq[int]], max_new_tokens: int, sampling: Sampling
    ) -> tuple[list[Sequence], int, float]:
        """The same, with the finished rows in front.

        Raises: what a row ended with, if that is an error.
        """
        rows = [self.engine.add_request(prompt, sampling.params(max_new_tokens))[0] for prompt in prompts]
        while any(not row.is_finished and row not in self.engine.decoding_rows for row in rows):
            self._step()  # rows that entered first may end before the last one enters
        num_before = sum(row.num_output_tokens for row in rows)
        start = perf_counter()
        while not all(row.is_finished for row in rows):
            self._step()
        return rows, sum(row.num_output_tokens for row in rows) - num_before, perf_counter() - start

    def _step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise output.error


class _Clock:
    """A streamer in the sense of transformers, which is handed the prompt first and then every emission."""

    def __init__(self, emissions: _Emissions) -> None:
        self._emissions = emissions
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self._emissions.add(value.numel())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


class TransformersArm(Arm):
    """`generate` of transformers on the same weights.

    Args:
      options: for the generation config, such as ``prompt_lookup_num_tokens`` or ``cache_implementation``.
      assistant: makes it assisted generation.
      assistant_options: set on the assistant's generation config before every run, since generation writes there;
        the old values are put back.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        eos_token_ids: Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
        assistant: Any = None,
        assistant_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._eos = list(eos_token_ids)
        self.options = dict(options or {})
        self._assistant = assistant
        self.assistant_options = dict(assistant_options or {})

    def run(self, prompt_ids: Seq[int], max_new_tokens: int, sampling: Sampling) -> Run:
        ids = torch.tensor([list(prompt_ids)])
        config = self._config(max_new_tokens, sampling)
        torch.manual_seed(sampling.seed)
        with torch.inference_mode(), self._prepared() as extra:
            emissions = _Emissions()
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=_Clock(emissions),
                **extra,
            )
        return emissions.as_run(output[0, len(prompt_ids) :].tolist())

    def _config(self, max_new_tokens: int, sampling: Sampling) -> GenerationConfig:
        chosen: dict[str, Any] = {"do_sample": not sampling.is_greedy}
        if not sampling.is_greedy:
            chosen |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        never = [-1]  # None would be replaced by the model's own
        eos = never if sampling.ignore_eos or not self._eos else self._eos
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=self._eos[0] if self._eos else 0,
            **chosen,
            **self.options,
        )

    @contextmanager
    def _prepared(self) -> Iterator[dict[str, Any]]:
        """The assistant set up, and transformers' advice about settings kept quiet; both undone afterwards."""
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        if self._assistant is None:
            extra, saved = {}, None
        else:
            extra, saved = {"assistant_model": self._assistant}, self._assistant.generation_config
            self._assistant.generation_config = GenerationConfig(**{**saved.to_dict(), **self.assistant_options})
        try:
            yield extra
        finally:
            logging.set_verbosity(verbosity)
            if saved is not None:
                self._assistant.generation_config = saved
