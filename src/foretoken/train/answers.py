"""Answers of the target to prompts, and prompts that it asks itself: what a drafter is to agree with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.config.sampling import SamplingParams
from foretoken.errors import ConfigError
from foretoken.folders import append_lines
from foretoken.llm import LLM
from foretoken.sessions.prompts import chat_prompt
from foretoken.train.examples import Asked, prompt_ids

ROWS = 16
"""Prompts that are answered together."""
TRIED = 2 * ROWS
"""Prompts that a dry run has answered."""
_MARK = "\u2402prompt\u2402"


@dataclass(frozen=True)
class Answering:
    """How answers are made.

    Args:
      max_new_tokens: beyond which they are cut.
      temperature: of every second one; the others are greedy.
      seed: of these.
    """

    max_new_tokens: int = 256
    temperature: float = 0.8
    seed: int = 0

    def params(self, number: int) -> SamplingParams:
        if number % 2 == 0:
            return SamplingParams(temperature=0.0, max_tokens=self.max_new_tokens)
        return SamplingParams(
            temperature=self.temperature, top_p=0.95, max_tokens=self.max_new_tokens, seed=self.seed + number
        )


def answered(
    llm: LLM,
    asked: list[Asked],
    how: Answering,
    file: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    is_raw: bool = False,
) -> list[Asked]:
    """All prompts with an answer. What is made is added to a file at once, and not made again after an interruption.

    Randomness: keyed by ``how.seed`` and the place of the prompt.
    """
    known = _read(file)
    missing = [(i, one) for i, one in enumerate(asked) if one.answer is None and one.digest not in known]
    for start in range(0, len(missing), ROWS):
        batch = missing[start : start + ROWS]
        prompts = [{"prompt_token_ids": list(prompt_ids(one, llm.tokenizer, is_raw=is_raw))} for _, one in batch]
        outputs = llm.generate(prompts, [how.params(i) for i, _ in batch], use_tqdm=False)
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


def to_try(asked: list[Asked], file: Path) -> tuple[list[Asked], int]:
    """What a dry run looks at: prompts that have an answer, here or in the file, and the first of those that have none.

    Those keep their places among prompts without an answer, so that the training which follows makes the same ones.

    Returns: prompts, and how many of them are still to be answered.
    """
    known = _read(file)
    missing = [one for one in asked if one.answer is None and one.digest not in known]
    left_out = {one.digest for one in missing[TRIED:]}
    return [one for one in asked if one.digest not in left_out], min(TRIED, len(missing))


def _read(file: Path) -> dict[str, tuple[str, bool]]:
    """Answers that were made before; a line that a kill has cut short does not count."""
    found: dict[str, tuple[str, bool]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[Asked(entry["prompt"], str(file)).digest] = entry["answer"], entry["ended"]
    return found


def asked_by_itself(llm: LLM, count: int, seed: int, max_new_tokens: int = 200) -> Iterator[Asked]:
    """Turns of a user that the target makes up, from what stands before one in its chat template, at temperature 1.

    Source: Magpie (Xu et al. 2024, arXiv:2406.08464).

    Raises: ConfigError for a target without a chat template.
    """
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise ConfigError("prompts that the target asks itself need a chat template; give --prompts instead")
    text = chat_prompt(llm.tokenizer, [{"role": "user", "content": _MARK}])["prompt"]
    before = llm.tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"]
    for start in range(0, count, ROWS):
        params = [
            SamplingParams(temperature=1.0, max_tokens=max_new_tokens, seed=seed + i, stop=["\n\n\n"])
            for i in range(start, min(count, start + ROWS))
        ]
        outputs = llm.generate([{"prompt_token_ids": before}] * len(params), params, use_tqdm=False)
        for i, output in enumerate(outputs, start):
            made = output.outputs[0].text.strip()
            if made:
                yield Asked(made, f"prompt {i} of the target's own")
