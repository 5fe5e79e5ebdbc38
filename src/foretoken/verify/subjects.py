"""What is judged: this library, transformers' own generation, or any function that generates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from foretoken.config.acceptance import TYPICAL, TypicalLimits
from foretoken.config.sampling import SamplingParams
from foretoken.errors import ConfigError
from foretoken.law.faults import described
from foretoken.law.noise import mix

if TYPE_CHECKING:
    from foretoken.llm import LLM

ALL = frozenset(field.name for field in fields(SamplingParams))
TRANSFORMERS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "n", "ignore_eos"}
)
"""Fields that `TransformersSubject` passes on."""


@dataclass(frozen=True)
class Sample:
    """One text that was generated.

    Args:
      token_ids: its tokens, without the prompt; None where only text is known.
      text: None where only tokens are known.
      logprobs: of every token, by token id; None where they were not returned.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True)
class Answer:
    """The samples of one prompt.

    Args:
      num_drafted, num_accepted: draft tokens that were verified, and kept; 0 where nobody counts.
    """

    samples: tuple[Sample, ...]
    num_drafted: int = 0
    num_accepted: int = 0


class Subject(ABC):
    """Something that generates.

    Args:
      name: for people.
      takes: fields of `SamplingParams` that it can be asked for; features that need others are left out by name.
      is_keyed: sampled texts are to be those of plain decoding with the same seed; else their law is tested alone.
      counts_drafts: what it answers says how many tokens were drafted.
      prefill_chunk_size: in which it reads prompts, where it is this library's and says so: chunks of another size are
        rounded otherwise, so plain decoding beside it reads them alike.
    """

    name: str
    takes: frozenset[str] = ALL
    is_keyed = False
    counts_drafts = False
    prefill_chunk_size: int | None = None

    @abstractmethod
    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
        """Continue prompts of token ids, each by its own parameters, which have a seed where they sample."""


class LLMSubject(Subject):
    """An `LLM`, as it drafts.

    Args:
      is_keyed: by default, what its acceptance rule promises.
    """

    counts_drafts = True

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        self.llm = llm
        self.name = name or f"{llm.speculative_config.title} over {llm.model_info.name}"
        self.is_keyed = llm.speculative_config.rule.keeps_tokens

    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
        """All prompts at once, in batches as large as the engine's."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = []
        for result in self.llm.generate(asked, list(params), use_tqdm=False):
            counts = result.metrics.speculative_decoding
            samples = tuple(
                Sample(
                    tuple(output.token_ids),
                    output.text,
                    None
                    if output.logprobs is None
                    else tuple({token: each.logprob for token, each in place.items()} for place in output.logprobs),
                )
                for output in result.outputs
            )
            answers.append(Answer(samples, counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]))
        return answers


class BrokenSubject(Subject):
    """The positive control: the drafter of an `LLM` under a rule that keeps whatever is drafted, and draws nothing."""

    name = "control"
    counts_drafts = True

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
        """All prompts at once."""
        broken = {"acceptance": TYPICAL.name, "typical": TypicalLimits(threshold=0.0, alpha=0.0)}
        with self._llm.engine(self._llm.drafting.new_drafter(), **broken) as engine:
            pairs = zip(prompts, params, strict=True)
            groups = [engine.add_request(list(prompt), each) for prompt, each in pairs]
            while not all(row.is_finished for rows in groups for row in rows):
                engine.step()
            return [
                Answer(
                    tuple(Sample(tuple(row.output_ids)) for row in rows),
                    sum(row.stats.num_draft_tokens for row in rows),
                    sum(row.stats.num_accepted_draft_tokens for row in rows),
                )
                for rows in groups
            ]


class FunctionSubject(Subject):
    """A function ``generate(prompt_ids, params)`` of somebody else's decoder.

    Args:
      function: takes a list of token ids and `SamplingParams`, and returns the tokens that follow; for ``n`` samples a
        list of such lists; without "n" in ``takes`` it is called for each, by seeds of their own. It may return
        `Sample` objects instead, which hold text and log-probabilities, too.
      takes, is_keyed: as of `Subject`. Functions are not keyed unless they say so: only who draws by this library's
        noise can return the tokens of plain decoding.
    """

    def __init__(
        self,
        function: Callable[[list[int], SamplingParams], Any],
        name: str | None = None,
        *,
        takes: frozenset[str] = ALL,
        is_keyed: bool = False,
    ) -> None:
        self._function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.takes, self.is_keyed = frozenset(takes), is_keyed

    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
        """One prompt after another."""
        return [self._answer(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: Seq[int], params: SamplingParams) -> Answer:
        if params.n > 1 and "n" not in self.takes:
            alone = [replace(params, n=1, seed=mix(params.seed or 0, index) % 2**63) for index in range(params.n)]
            return Answer(tuple(sample for one in alone for sample in self._answer(prompt, one).samples))
        try:
            given = self._function(list(prompt), params)
        except Exception as error:  # whatever a stranger's decoder raises for what it cannot do
            raise ConfigError(f"{self.name} fails ({described(error)})") from error
        several = given if params.n > 1 else [given]
        try:
            samples = tuple(one if isinstance(one, Sample) else Sample(tuple(map(int, one))) for one in several)
        except (TypeError, ValueError):
            what = "a list of samples" if params.n > 1 else "token ids"
            raise ConfigError(f"{self.name} returned {given!r:.60}, where n={params.n} asks for {what}") from None
        if len(samples) != params.n:
            raise ConfigError(f"{self.name} returned {len(samples)} samples where n={params.n}; return a list of them")
        return Answer(samples)


class TransformersSubject(Subject):
    """``generate`` of transformers: plain, assisted, or by prompt lookup.

    Args:
      model: of transformers, in memory.
      eos_token_ids: that end a text.
      options: for the generation config, such as ``prompt_lookup_num_tokens``.
      assistant: makes it assisted generation.
    """

    takes = TRANSFORMERS

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        eos_token_ids: Seq[int] = (),
        options: Mapping[str, Any] | None = None,
        assistant: Any = None,
    ) -> None:
        self.name = name
        self._model, self._assistant = model, assistant
        self._eos = list(eos_token_ids)
        self._options = dict(options or {})

    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
        """One sample after another: assisted generation takes no batches."""
        return [
            Answer(tuple(self._sample(prompt, each, index) for index in range(each.n)))
            for prompt, each in zip(prompts, params, strict=True)
        ]

    def _sample(self, prompt: Seq[int], params: SamplingParams, index: int) -> Sample:
        import torch

        from foretoken.bench.arms import generation_config, without_advice

        config = generation_config(params, self._eos, self._options)
        torch.manual_seed(mix(params.seed or 0, index) % 2**63)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        with torch.inference_mode(), without_advice():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                assistant_model=self._assistant,
            )
        return Sample(tuple(found[0, len(prompt) :].tolist()))


def asked_for(params: SamplingParams) -> set[str]:
    """Fields that parameters set to something else than plain greedy decoding has."""
    plain = replace(SamplingParams(temperature=0.0), max_tokens=params.max_tokens, seed=params.seed)
    return {name for name in ALL if getattr(params, name) != getattr(plain, name)}
