"""The prompts of a race, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretoken.bench.workload import AGAIN, COPY, Prompt, asked_again, load_prompts, read_questions, select
from foretoken.errors import ConfigError
from foretoken.loading.models import load_tokenizer


def prompts_of(
    target: Path,
    kinds: tuple[str, ...] | None,
    prompts_file: Path | None,
    max_new_tokens: int,
    answer: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> Iterator[Prompt]:
    """Prompts of the kinds in turn; those that leave no room for the output are left out.

    Args:
      target: the checkpoint.
      kinds: None for all but passages to copy; "again" is a question asked again after the model's own answer.
      answer: the greedy answer to a prompt.

    Raises: ConfigError for a kind that no prompt has.
    """
    tokenizer: Any = load_tokenizer(target) if (target / "tokenizer_config.json").exists() else None
    context = json.loads((target / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    room = None if context is None else context - max_new_tokens
    questions = read_questions(prompts_file)
    known = list(dict.fromkeys(question.category for question in questions))
    wanted = kinds or [kind for kind in known if kind != COPY]
    unknown = [kind for kind in wanted if kind not in (*known, AGAIN)]
    if unknown:
        raise ConfigError(f"no prompt is of the kind {unknown[0]!r}; choose among {', '.join((*known, AGAIN))}")
    plain = [question for question in questions if question.category in wanted and question.category != COPY]
    for question in select(plain, len(plain)):
        yield from load_prompts(tokenizer, [question], None, room)
    for question in questions if COPY in wanted else ():
        if question.category == COPY:
            yield from load_prompts(tokenizer, [question], None, room)
    for question in select(questions, len(questions)) if AGAIN in wanted else ():
        yield from asked_again(tokenizer, [question], answer, room)
