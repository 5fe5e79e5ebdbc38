"""The prompts to generate from: short ones of several kinds, and files of users."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError, PromptError
from foredraft.prompts.prompt_files import PromptLine, read_prompts_file
from foredraft.prompts.prompts import chat_text

COPY = "copy"
AGAIN = "again"
"""The kind of prompts that are made by letting the model answer: see `asked_again`."""
_COPIED_WORDS = 16  # of the passage's beginning that follow the passage in a copying prompt
_REPEATED = 8


@dataclass(frozen=True)
class BenchPrompt:
    """Token ids to continue, and where they come from. Of a group of prompts, ``token_ids`` are those of each."""

    name: str
    category: str
    token_ids: tuple[Any, ...]


def read_questions(path: Path | None = None) -> list[PromptLine]:
    """Read prompts: those that ship with the package, or a file.

    A file is Spec-Bench's ``question.jsonl`` (arXiv:2401.07851), or any that `read_prompts_file` takes. The keys
    ``category`` and ``question_id`` may be left out.

    Raises: PromptError for a file that cannot be read or is empty, and for a line without a prompt.
    """
    file = path or Path(__file__).with_name("prompts.jsonl")
    lines = read_prompts_file(file)
    if not lines:
        raise PromptError(f"the prompts file {file} is empty; give one prompt per line")
    return lines


def _name(line: PromptLine) -> str:
    """Kind and number of a prompt, the number being that of its file where it has one."""
    named = line.keys.get("question_id")
    return f"{line.category}-{named if isinstance(named, int) else line.number}"


def select(questions: Iterable[PromptLine], num_prompts: int, *, copying: bool = False) -> list[PromptLine]:
    """The first prompts of every kind in turn, so that few prompts still cover the kinds."""
    by_kind: dict[str, list[PromptLine]] = {}
    for question in questions:
        if (question.category == COPY) == copying:
            by_kind.setdefault(question.category, []).append(question)
    in_turn = [question for turn in zip_longest(*by_kind.values()) for question in turn if question is not None]
    return in_turn[:num_prompts]


def prompts_of_kinds(
    tokenizer: Any,
    questions: Sequence[PromptLine],
    kinds: Sequence[str] | None,
    room: int | None,
    answer: Callable[[tuple[int, ...]], Sequence[int]],
) -> Iterator[BenchPrompt]:
    """Prompts of the kinds in turn, one after another as they are asked for.

    Args:
      kinds: None for all that the questions have but passages to copy; "again" is made by letting the model answer.
      room: longest prompt; others are left out.
      answer: see `asked_again`.

    Raises: ConfigError for a kind that no question has.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    wanted = kinds or [kind for kind in known if kind != COPY]
    unknown = [kind for kind in wanted if kind not in (*known, AGAIN)]
    if unknown:
        raise ConfigError(f"no prompt is of the kind {unknown[0]!r}; choose among {', '.join((*known, AGAIN))}")

    def of(kind: str) -> Iterator[BenchPrompt]:
        if kind == AGAIN:
            for question in select(questions, len(questions)):
                for prompt in asked_again(tokenizer, [question], answer, room):
                    yield replace(prompt, category=AGAIN)
        for question in questions:
            if question.category == kind:
                yield from load_prompts(tokenizer, [question], room)

    return (prompt for turn in zip_longest(*map(of, wanted)) for prompt in turn if prompt is not None)


def load_prompts(tokenizer: Any, questions: Sequence[PromptLine], max_length: int | None = None) -> list[BenchPrompt]:
    """Turn questions into prompts in the tokenizer's chat format; those of the kind "copy" become passage + beginning.

    Token ids stay as they are given.

    Args:
      max_length: prompts beyond it are left out.

    Raises: ConfigError for text without a tokenizer.
    """
    prompts = []
    for question in questions:
        ids = _token_ids(tokenizer, question)
        if max_length is None or len(ids) <= max_length:
            prompts.append(BenchPrompt(_name(question), question.category, ids))
    return prompts


def asked_again(
    tokenizer: Any,
    questions: Sequence[PromptLine],
    answer: Callable[[tuple[int, ...]], Sequence[int]],
    max_length: int | None = None,
) -> list[BenchPrompt]:
    """Conversations that hold a question, the model's own answer, and the question again.

    What a model says twice is there to be copied, also by a model too small to copy a passage that it was given.

    Args:
      answer: the model's greedy answer to token ids, up to where it ends.
    """
    gap = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
    prompts = []
    for question in questions:
        ids = _token_ids(tokenizer, question)
        ids = (*ids, *answer(ids), *gap, *ids)
        if max_length is None or len(ids) <= max_length:
            prompts.append(BenchPrompt(f"{_name(question)}-again", question.category, ids))
    return prompts


def copying_text(passage: str) -> str:
    """A passage, and its beginning again: a continuation that copies is the natural one."""
    words = list(re.finditer(r"\S+", passage))[:_COPIED_WORDS]
    end = words[-1].end() if words else 0
    return f"{passage.rstrip()}\n\n{passage[:end]}"


def _token_ids(tokenizer: Any, question: PromptLine) -> tuple[int, ...]:
    if question.token_ids is not None:
        return question.token_ids
    if tokenizer is None:
        raise ConfigError("the prompts are text, and the model has no tokenizer; give a file with prompt_token_ids")
    return _encode(tokenizer, copying_text(question.text) if question.category == COPY else None, question.text)


def _encode(tokenizer: Any, raw: str | None, question: str) -> tuple[int, ...]:
    if raw is None:
        if tokenizer.chat_template:
            raw = chat_text(tokenizer, question)
        else:
            raw = question
    return tuple(tokenizer(raw, add_special_tokens=False)["input_ids"])


def repeated_share(outputs: Iterable[Sequence[int]], size: int = _REPEATED) -> float:
    """Share of tokens that lie inside an n-gram which occurs more than once in the same output.

    (1, 2, 1, 2, 3) with size 2: (1, 2) occurs twice and covers four of five tokens: 0.8.
    """
    num_tokens = num_covered = 0
    for tokens in outputs:
        windows = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        counts = Counter(windows)
        covered = {i + k for i, window in enumerate(windows) if counts[window] > 1 for k in range(size)}
        num_tokens += len(tokens)
        num_covered += len(covered)
    return num_covered / num_tokens if num_tokens else 0.0
