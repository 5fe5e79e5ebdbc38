"""The prompts of a training and the target's answers to them; of a trial, the first alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.folders import keep_text
from foretoken.train.answers import TRIED, answered, asked_by_itself, to_try
from foretoken.train.examples import Asked, read_prompts

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.train.plan import Plan


@dataclass
class Gathering:
    """Reads prompts or lets the target ask them, and has them answered. What is made is kept in the plan's folder.

    Args:
      llm, plan, say: of the run.
      is_trial: only so much is made as tells how long all of it takes.
      num_left_out: prompts that a trial has not looked at.
      seconds: that prompts and answers which are still to be made will take, from those that a trial has made.
    """

    llm: LLM
    plan: Plan
    say: Callable[[str], None]
    is_trial: bool = False
    num_left_out: int = 0
    seconds: float = 0.0

    def prompts(self) -> Iterator[Asked]:
        """Those of files, then those that the target asks."""
        if self.plan.prompts is not None:
            yield from read_prompts(self.plan.prompts)
        if self.plan.own_prompts:
            yield from self._own_prompts(self.plan.out / "own_prompts.jsonl", self.plan.own_prompts)

    def answers(self, asked: list[Asked]) -> list[Asked]:
        """Prompts with their answers: all, or those that a trial looks at."""
        file, tried, num_made = self.plan.out / "answers.jsonl", asked, 0
        if self.is_trial:
            tried, num_made = to_try(asked, file)
            self.num_left_out += len(asked) - len(tried)
        start = time.perf_counter()
        found = answered(self.llm, tried, self.plan.answering, file, self._report, is_raw=self.plan.raw)
        if num_made:
            self.seconds += (time.perf_counter() - start) * (num_made + self.num_left_out) / num_made
        return found

    def _own_prompts(self, file: Path, number: int) -> list[Asked]:
        if not file.exists():
            wanted = min(number, TRIED) if self.is_trial else number
            self.say(f"the target asks itself {wanted} prompts")
            start = time.perf_counter()
            made = list(asked_by_itself(self.llm, wanted, self.plan.seed))
            if self.is_trial:
                self.num_left_out += number - wanted
                self.seconds += (time.perf_counter() - start) * number / wanted
                return made
            keep_text(file, "".join(json.dumps({"prompt": one.text}) + "\n" for one in made))
        return read_prompts(file)

    def _report(self, done: int, total: int) -> None:
        self.say(f"{done} of {total} prompts answered")
