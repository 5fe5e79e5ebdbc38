"""Answers of the target to prompts, and prompts that it asks itself: what a drafter is to agree with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError
from foredraft.folders import append_lines, keep_text
from foredraft.llm import LLM
from foredraft.prompts.prompts import chat_prompt
from foredraft.train.examples import TrainingPrompt, prompt_ids, read_prompts
from foredraft.train.plan import Answering, Plan

_MARK = "\u2402prompt\u2402"


def answered(
    llm: LLM,
    asked: list[TrainingPrompt],
    how: Answering,
    file: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    is_raw: bool = False,
) -> list[TrainingPrompt]:
    """All prompts with an answer, `max_num_seqs` of them answered together.

    What is made is added to a file at once, and not made again after an interruption.

    Randomness: keyed by ``how.seed`` and the place of the prompt.
    """
    known = _read(file)
    missing = [(i, one) for i, one in enumerate(asked) if one.answer is None and one.digest not in known]
    rows = llm.engine_config.max_num_seqs
    for start in range(0, len(missing), rows):
        batch = missing[start : start + rows]
        prompts = [{"prompt_token_ids": list(prompt_ids(one, llm.tokenizer, is_raw=is_raw))} for _, one in batch]
        outputs = llm.generate(prompts, [how.params(i).explicit() for i, _ in batch], use_tqdm=False)
        lines = []
        for (_, one), output in zip(batch, outputs, strict=True):
            (text,) = output.outputs
            known[one.digest] = text.text, text.finish_reason != "length"
            entry = {"prompt": one.text, "answer": text.text, "ended": text.finish_reason != "length"}
            lines.append(json.dumps(entry) + "\n")
        append_lines(file, "".join(lines))
        if report is not None:
            report(start + len(batch), len(missing))
    return [
        one if one.answer is not None else replace(one, answer=known[one.digest][0], ended=known[one.digest][1])
        for one in asked
    ]


def to_try(asked: list[TrainingPrompt], file: Path, most: int) -> tuple[list[TrainingPrompt], int]:
    """What a dry run looks at: prompts that have an answer, here or in the file, and the first ``most`` of the others.

    Those keep their places among prompts without an answer, so that the training which follows makes the same ones.

    Returns: prompts, and how many of them are still to be answered.
    """
    known = _read(file)
    missing = [one for one in asked if one.answer is None and one.digest not in known]
    left_out = {one.digest for one in missing[most:]}
    return [one for one in asked if one.digest not in left_out], min(most, len(missing))


def _read(file: Path) -> dict[str, tuple[str, bool]]:
    """Answers that were made before; a line that a kill has cut short does not count."""
    found: dict[str, tuple[str, bool]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[TrainingPrompt(entry["prompt"], str(file)).digest] = entry["answer"], entry["ended"]
    return found


def asked_by_itself(llm: LLM, count: int, seed: int, max_new_tokens: int = 200) -> Iterator[TrainingPrompt]:
    """Turns of a user that the target makes up, from what stands before one in its chat template, at temperature 1.

    Source: Magpie (Xu et al. 2024, arXiv:2406.08464).

    Raises: ConfigError for a target without a chat template.
    """
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise ConfigError("prompts that the target asks itself need a chat template; give --prompts instead")
    text = chat_prompt(llm.tokenizer, [{"role": "user", "content": _MARK}])["prompt"]
    before = llm.tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"]
    rows = llm.engine_config.max_num_seqs
    for start in range(0, count, rows):
        params = [
            SamplingParams(temperature=1.0, max_tokens=max_new_tokens, seed=seed + i, stop=["\n\n\n"]).explicit()
            for i in range(start, min(count, start + rows))
        ]
        outputs = llm.generate([{"prompt_token_ids": before}] * len(params), params, use_tqdm=False)
        for i, output in enumerate(outputs, start):
            made = output.outputs[0].text.strip()
            if made:
                yield TrainingPrompt(made, f"prompt {i} of the target's own")


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

    @property
    def _most_tried(self) -> int:
        """How many prompts a trial makes, and has answered: two batches."""
        return 2 * self.llm.engine_config.max_num_seqs

    def prompts(self) -> Iterator[TrainingPrompt]:
        """Those of files, then those that the target asks."""
        if self.plan.prompts is not None:
            yield from read_prompts(self.plan.prompts)
        if self.plan.own_prompts:
            yield from self._own_prompts(self.plan.out / "own_prompts.jsonl", self.plan.own_prompts)

    def answers(self, asked: list[TrainingPrompt]) -> list[TrainingPrompt]:
        """Prompts with their answers: all, or those that a trial looks at."""
        file, tried, num_made = self.plan.out / "answers.jsonl", asked, 0
        if self.is_trial:
            tried, num_made = to_try(asked, file, self._most_tried)
            self.num_left_out += len(asked) - len(tried)
        start = time.perf_counter()
        found = answered(self.llm, tried, self.plan.answering, file, self._report, is_raw=self.plan.raw)
        if num_made:
            self.seconds += (time.perf_counter() - start) * (num_made + self.num_left_out) / num_made
        return found

    def _own_prompts(self, file: Path, number: int) -> list[TrainingPrompt]:
        if not file.exists():
            wanted = min(number, self._most_tried) if self.is_trial else number
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
