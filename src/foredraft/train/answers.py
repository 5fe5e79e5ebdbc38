"""Answers of the target to prompts, and prompts that the target invents, as training data for drafters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError
from foredraft.folders import append_lines, json_lines
from foredraft.llm import LLM
from foredraft.prompts.prompts import chat_prompt
from foredraft.train.examples import TrainingPrompt, prompt_ids
from foredraft.train.plan import Plan

_MARK = "\u2402prompt\u2402"


def answered(
    llm: LLM,
    asked: list[TrainingPrompt],
    plan: Plan,
    file: Path,
    report: Callable[[int, int], None] | None = None,
) -> list[TrainingPrompt]:
    """Return all prompts with an answer. Missing answers are generated, `max_num_seqs` at a time.

    New answers are appended to a file at once, so that an interrupted run does not generate them again.

    Args:
      asked: prompts, with or without an answer.
      file: JSON lines with the answers that are complete.
      report: function that is called with the number of generated answers and the number of all missing ones.

    Randomness: keyed by ``plan.seed`` and the index of the prompt.
    """
    known = _read(file)
    missing = [(i, one) for i, one in enumerate(asked) if one.answer is None and one.digest not in known]
    rows = llm.engine_config.max_num_seqs
    for start in range(0, len(missing), rows):
        batch = missing[start : start + rows]
        prompts = [{"prompt_token_ids": list(prompt_ids(one, llm.tokenizer, is_raw=plan.raw))} for _, one in batch]
        outputs = llm.generate(prompts, [plan.answer_params(i).explicit() for i, _ in batch], use_tqdm=False)
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
    """Return the prompts of a dry run: those with an answer, here or in the file, and the first ``most`` of the others.

    The chosen ones keep their index among the prompts without an answer, so the training generates the same answers.

    Returns: the prompts, and the number of answers to generate.
    """
    known = _read(file)
    missing = [one for one in asked if one.answer is None and one.digest not in known]
    left_out = {one.digest for one in missing[most:]}
    return [one for one in asked if one.digest not in left_out], min(most, len(missing))


def _read(file: Path) -> dict[str, tuple[str, bool]]:
    """Return the answers in a file, by the digest of their prompts."""
    return {
        TrainingPrompt(entry["prompt"], str(file)).digest: (entry["answer"], entry["ended"])
        for entry in json_lines(file)
    }


def asked_by_itself(llm: LLM, count: int, seed: int, max_new_tokens: int = 200) -> Iterator[TrainingPrompt]:
    """Yield user turns that the target invents at temperature 1, from the part of its chat template before a user turn.

    Source: Magpie (Xu et al. 2024, arXiv:2406.08464).

    Raises: ConfigError for a target without a chat template.
    """
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise ConfigError("the target has no chat template, so it cannot invent prompts; use --prompts instead")
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
