"""Plain and speculative decoding of the same questions in turns, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from foredraft.beginnings import first_difference
from foredraft.cli.writers import fates, pooled, ratio
from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import RequestOutput, Stream
from foredraft.engine.stats import RowStats
from foredraft.llm import LLM
from foredraft.machine import cpu_name
from foredraft.prompts.prompts import PromptLike

QUESTIONS = (
    "What are three tips for sleeping better?",
    "Write a Python class Stack with push, pop, peek and is_empty.",
    "I want to learn how to cook. Where should I begin?",
    "Correct all mistakes in this text.\n\nhello anna, thank you for you're letter. i am realy happy that you comes to "
    "visit us in june. the childs can not wait to see you. please tell us when your train arrive, then peter will wait "
    "for you at the station. we has a bed for you in the small room. see you soon, mary",
    "Do you prefer the sea or the mountains for a holiday?",
    "Shorten this text to half its length: The old bakery on Mill Street reopened last week after six months of work. "
    "The owners kept the brick oven from 1912 and added a small cafe with eight tables. Bread is baked at four every "
    "morning, and the first customers arrive at six. On Saturdays there are classes for children.",
    "My team lost the football match again. What should they change?",
    "What kind of music do you like to listen to in the evening?",
)
"""Requests to an assistant, not chosen for their gain. Five of eight are chat, where nothing can be copied, as are half
or more of the first n for any n. The other questions are code, a correction and a summary."""

TOY = "zoo:tiny"

WARM_UP = (
    "Which of these fruits and nuts grow in the north, and which of them only where it is warm? apples, bananas, "
    "cherries, dates, figs, grapes, kiwis, lemons, limes, mangos, melons, olives, oranges, papayas, peaches, pears, "
    "pineapples, plums, pomegranates, quinces, raspberries, strawberries, blueberries, apricots, cranberries, almonds, "
    "hazelnuts, walnuts, chestnuts"
)
"""Prompt for warming up, so that loading and compiling count for neither way. The prompt has more than 64 tokens,
because the layers of longer prompts run in another form, which is made when it is first needed."""

TOY_QUESTIONS = (
    "Tell me a story about a lion and a mouse.",
    "Tom has 5 apples and buys 7 more. How many apples does he have?",
    "How do I list all files in a directory?",
    "Which countries border France?",
)
"""Prompts of the kind that zoo:tiny was trained on."""


def questions_for(model: str) -> tuple[str, ...]:
    """The built-in questions that a model can answer."""
    return TOY_QUESTIONS if model == TOY else QUESTIONS


@dataclass
class Lane:
    """State of decoding one question in one way.

    Args:
      title: name of the way.
      pieces: pieces of text in order, and whether each was drafted.
      seconds: time spent in this lane, with the prompt.
      output: result; None until the answer has ended.
    """

    title: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    output: RequestOutput | None = None

    @property
    def is_done(self) -> bool:
        return self.output is not None

    @property
    def token_ids(self) -> Sequence[int]:
        return () if self.output is None else self.output.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return "" if self.output is None else self.output.outputs[0].finish_reason

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def advance(self, stream: Stream) -> None:
        """Decode until new text arrives or the answer ends."""
        start = perf_counter()
        delta = next(stream, None)
        self.seconds += perf_counter() - start
        if delta is not None:
            self.num_tokens += len(delta.token_ids)
            self.pieces += [(text, source != "target") for text, source in delta.segments]
        if delta is None or delta.finish_reason is not None:
            self.output = stream.output(0)


@dataclass(frozen=True)
class BothAnswers:
    """One question, decoded both ways."""

    question: str
    plain: Lane
    drafting: Lane

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.plain, self.drafting

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if none does."""
        return first_difference(self.plain.token_ids, self.drafting.token_ids)

    @property
    def is_identical(self) -> bool:
        return self.first_difference is None

    @property
    def speedup(self) -> float:
        """Time of plain decoding divided by that of speculative decoding. Meaningful for equal texts only."""
        return self.plain.seconds / self.drafting.seconds

    def count(self, name: str) -> int:
        """A counter of speculative decoding."""
        assert self.drafting.output is not None
        return int(self.drafting.output.metrics.speculative_decoding[name])


def race(
    llms: tuple[LLM, LLM],
    question: str,
    prompt: PromptLike,
    params: SamplingParams,
    watch: Callable[[BothAnswers], None] = lambda answer: None,
) -> BothAnswers:
    """Decode a question plainly and speculatively in turns. The lane that has used less time is next.

    At every moment, plain and speculative decoding have had the same time, and noise of the machine affects both
    equally. The time of ``watch`` counts for neither.

    Args:
      llms: plain and speculative, over one target.
      watch: called after every turn.
    """
    answer = BothAnswers(question, Lane("plain"), Lane(llms[1].speculative_config.title))
    with ExitStack() as stack:
        running = [
            (lane, stack.enter_context(llm.stream(prompt, params)))
            for lane, llm in zip(answer.lanes, llms, strict=True)
        ]
        while running:
            lane, stream = min(running, key=lambda turn: turn[0].seconds)
            lane.advance(stream)
            running = [turn for turn in running if not turn[0].is_done]
            watch(answer)
    return answer


@dataclass(frozen=True)
class DemoReport:
    """The results over all questions.

    Args:
      model: description of the model.
      llm: LLM of the speculative way.
    """

    model: str
    llm: LLM
    params: SamplingParams
    answers: tuple[BothAnswers, ...]

    @property
    def method(self) -> str:
        """Method of drafting."""
        return self.llm.speculative_config.title

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions of the measurement, with the names of ``--json``."""
        return {
            "dtype": self.llm.model_info.dtype,
            "execution": self.llm.model_info.execution,
            "num_threads": torch.get_num_threads(),
            "cpu": cpu_name(),
        }

    @property
    def num_identical(self) -> int:
        return sum(answer.is_identical for answer in self.answers)

    @property
    def is_identical(self) -> bool:
        return self.num_identical == len(self.answers)

    @property
    def speedups(self) -> list[float]:
        """Speed-up of every question; empty if a text differs."""
        return [answer.speedup for answer in self.answers] if self.is_identical else []

    @property
    def speedup(self) -> float:
        """Speed over all tokens and seconds relative to plain decoding; NaN if a text differs."""
        if not self.is_identical:
            return float("nan")
        return ratio(self.tokens_per_second(self.drafting), self.tokens_per_second(self.plain))

    @property
    def tokens_per_step(self) -> float:
        return ratio(sum(lane.num_tokens for lane in self.drafting), self.counts.num_steps)

    @property
    def counts(self) -> RowStats:
        """Counters of all drafts."""
        return pooled([lane.output for lane in self.drafting if lane.output is not None])

    def tokens_per_second(self, lanes: Sequence[Lane]) -> float:
        """All tokens divided by all seconds."""
        return ratio(sum(lane.num_tokens for lane in lanes), sum(lane.seconds for lane in lanes))

    @property
    def plain(self) -> list[Lane]:
        return [answer.plain for answer in self.answers]

    @property
    def drafting(self) -> list[Lane]:
        return [answer.drafting for answer in self.answers]

    def as_dict(self) -> dict[str, Any]:
        """Report for ``--json``, with speeds only if all texts are equal."""
        counts = self.counts
        report: dict[str, Any] = {
            "model": self.model,
            "method": self.method,
            "num_speculative_tokens": self.llm.speculative_config.num_speculative_tokens,
            "exactness": self.llm.engine_config.exactness,
            "guarantee": self.llm.guarantee.as_dict(),
            **self.conditions,
            "max_new_tokens": self.params.max_tokens,
            "temperature": self.params.temperature,
            "num_prompts": len(self.answers),
            "num_identical": self.num_identical,
            "mean_acceptance_length": counts.mean_acceptance_length,
            **fates(counts),
            "tokens_per_step": self.tokens_per_step,
            "lossless": all(lane.output is None or lane.output.lossless for lane in self.drafting),
            "speedup": None,
            "questions": [self._question(answer) for answer in self.answers],
        }
        if self.is_identical:
            speedups = self.speedups
            report["speedup"] = {"total": self.speedup, "lowest": min(speedups), "highest": max(speedups)}
            report["num_tokens"] = sum(lane.num_tokens for lane in self.plain)
            report["plain_tokens_per_second"] = self.tokens_per_second(self.plain)
            report[f"{self.method}_tokens_per_second"] = self.tokens_per_second(self.drafting)
        return report

    def _question(self, answer: BothAnswers) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "question": answer.question,
            "text": answer.plain.text,
            "num_tokens": answer.plain.num_tokens,
            "finish_reason": answer.plain.finish_reason,
            "first_difference": answer.first_difference,
            "tokens_per_step": ratio(answer.drafting.num_tokens, answer.count("num_steps")),
        }
        if answer.is_identical:
            facts |= {
                "plain_seconds": answer.plain.seconds,
                "drafting_seconds": answer.drafting.seconds,
                "speedup": answer.speedup,
            }
        return facts
