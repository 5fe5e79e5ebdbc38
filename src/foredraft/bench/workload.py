"""The prompts of benchmarks: short ones of several kinds, or a file of the user."""

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
"""Kind of the prompts that contain the model's own answer; see `asked_again`."""
_COPIED_WORDS = 16  # words of the passage that are repeated after it in a copying prompt
_REPEATED = 8


@dataclass(frozen=True)
class BenchPrompt:
    """Token ids to continue, and their name and kind. For a group of prompts, ``token_ids`` is a tuple of prompts."""

    name: str
    category: str
    token_ids: tuple[Any, ...]


def read_questions(path: Path | None = None) -> list[PromptLine]:
    """Read the prompts of the package, or those of a file.

    A file is Spec-Bench's ``question.jsonl`` (arXiv:2401.07851) or any file that `read_prompts_file` reads. The keys
    ``category`` and ``question_id`` are optional.

    Raises: PromptError for a file that cannot be read or is empty, and for a line without a prompt.
    """
    file = path or Path(__file__).with_name("prompts.jsonl")
    lines = read_prompts_file(file)
    if not lines:
        raise PromptError(f"the prompts file {file} is empty; give one prompt per line")
    return lines


def _name(line: PromptLine) -> str:
    """Return the kind and the number of a prompt. The number is ``question_id`` if the file has that key."""
    named = line.keys.get("question_id")
    return f"{line.category}-{named if isinstance(named, int) else line.number}"


def select(questions: Iterable[PromptLine], num_prompts: int, *, copying: bool = False) -> list[PromptLine]:
    """Return the first prompts of every kind, with the kinds in turn, so that a small number of prompts covers all
    kinds."""
    by_kind: dict[str, list[PromptLine]] = {}
    for question in questions:
        if (question.category == COPY) == copying:
            by_kind.setdefault(question.category, []).append(question)
    in_turn = [question for turn in zip_longest(*by_kind.values()) for question in turn if question is not None]
    return in_turn[:num_prompts]


def check_kinds(questions: Iterable[PromptLine], kinds: Sequence[str] | None) -> None:
    """Raise ConfigError for a kind that no question has. The kind "again" is made from the other questions."""
    known = (*dict.fromkeys(question.category for question in questions), AGAIN)
    for kind in kinds or ():
        if kind not in known:
            raise ConfigError(f"no prompt is of the kind {kind!r}; choose among {', '.join(known)}")


def prompts_of_kinds(
    tokenizer: Any,
    questions: Sequence[PromptLine],
    kinds: Sequence[str] | None,
    room: int | None,
    answer: Callable[[tuple[int, ...]], Sequence[int]],
) -> Iterator[BenchPrompt]:
    """Yield prompts, with the kinds in turn. The prompts are created on demand.

    Args:
      kinds: kinds of prompts; None for all kinds of the questions except "copy". The kind "again" is made with
        ``answer``.
      room: length of the longest prompt in tokens; longer ones are left out.
      answer: see `asked_again`.

    Raises: ConfigError for a kind that no question has.
    """
    check_kinds(questions, kinds)
    known = dict.fromkeys(question.category for question in questions)
    wanted = kinds or [kind for kind in known if kind != COPY]

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
    """Convert questions to prompts in the tokenizer's chat format.

    Questions of the kind "copy" become a passage followed by its beginning. Token ids are used as given.

    Args:
      max_length: length of the longest prompt in tokens; longer ones are left out.

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
    """Return conversations that contain a question, the model's own answer, and the question again.

    The second answer can be copied from the first one, even by a model that is too small to copy a given passage.

    Args:
      answer: function from token ids to the model's greedy answer, up to its end.
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
    """Return a passage followed by its own beginning, so that copying is the natural continuation."""
    words = list(re.finditer(r"\S+", passage))[:_COPIED_WORDS]
    end = words[-1].end() if words else 0
    return f"{passage.rstrip()}\n\n{passage[:end]}"


def _token_ids(tokenizer: Any, question: PromptLine) -> tuple[int, ...]:
    if question.token_ids is not None:
        return question.token_ids
    if tokenizer is None:
        raise ConfigError("the prompts are text, but the model has no tokenizer; use a file with prompt_token_ids")
    return _encode(tokenizer, copying_text(question.text) if question.category == COPY else None, question.text)


def _encode(tokenizer: Any, raw: str | None, question: str) -> tuple[int, ...]:
    if raw is None:
        if tokenizer.chat_template:
            raw = chat_text(tokenizer, question)
        else:
            raw = question
    return tuple(tokenizer(raw, add_special_tokens=False)["input_ids"])


def repeated_share(outputs: Iterable[Sequence[int]], size: int = _REPEATED) -> float:
    """Return the share of tokens inside an n-gram that occurs more than once in the same output.

    (1, 2, 1, 2, 3) with size 2: (1, 2) occurs twice and covers four of five tokens, so the share is 0.8.
    """
    num_tokens = num_covered = 0
    for tokens in outputs:
        windows = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        counts = Counter(windows)
        covered = {i + k for i, window in enumerate(windows) if counts[window] > 1 for k in range(size)}
        num_tokens += len(tokens)
        num_covered += len(covered)
    return num_covered / num_tokens if num_tokens else 0.0
