"""Training data of drafters: prompts with the target's own answers, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foredraft.config.keywords import check_unicode
from foredraft.errors import PromptError
from foredraft.prompts.prompt_files import PromptLine, read_prompts_file
from foredraft.prompts.prompts import chat_prompt

SUFFIXES = (".jsonl", ".jsonl.xz", ".txt")
"""Suffixes of the files of prompts that are read from a folder."""


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt of a file.

    Args:
      text: one user turn, or plain text for a model without a chat template.
      place: file and line, for messages.
      answer: answer of the target; None if it is not generated yet.
      ended: False if the answer was cut at the token limit.
    """

    text: str
    place: str
    answer: str | None = None
    ended: bool = True

    @property
    def digest(self) -> str:
        """SHA-256 of the text. Held-out prompts are chosen by it, whatever the order of prompts."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Example:
    """A prompt and the target's answer.

    Args:
      token_ids: tokens of prompt and answer.
      prompt_length: number of prompt tokens; the loss counts only the tokens after them.
      key: identifier of the example.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    key: str

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """Read the prompts of a file, or of all files of a folder.

    A .txt file has one prompt per line; other files have JSON lines, xz-compressed or not. A JSON line has ``prompt``,
    ``text`` or ``turns`` (of which the first is used), and optionally ``answer`` and ``ended`` for the target's answer.

    Raises: PromptError for a file that cannot be read, a line without a prompt, or a file without prompts.
    """
    path = path.expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise PromptError(f"{path} contains no files of prompts; their names must end in {', '.join(SUFFIXES)}")
    else:
        files = [path]
    found = [_asked(line) for file in files for line in read_prompts_file(file)]
    if not found:
        raise PromptError(f"{path} contains no prompts; write one per line")
    return found


def _asked(line: PromptLine) -> TrainingPrompt:
    answer, ended = line.keys.get("answer"), line.keys.get("ended", True)
    if not line.text.strip():
        raise PromptError(f"{line.place} contains no prompt; give a non-empty prompt, text or turns (a list of text)")
    if not (answer is None or isinstance(answer, str)) or not isinstance(ended, bool):
        raise PromptError(
            f"{line.place}: answer must be text, and ended must be true or false; leave answer out to generate it"
        )
    check_unicode(line.text, line.place)
    return TrainingPrompt(line.text, line.place, answer, ended)


def prompt_ids(asked: TrainingPrompt, tokenizer: Any, *, is_raw: bool = False) -> tuple[int, ...]:
    """Return the token ids of a prompt as the target gets it: in its chat template, if it has one and ``is_raw`` is
    False."""
    if tokenizer.chat_template and not is_raw:
        ids = chat_prompt(tokenizer, [{"role": "user", "content": asked.text}])["prompt_token_ids"]
    else:
        ids = tokenizer(asked.text)["input_ids"]
    if not ids:
        raise PromptError(f"{asked.place}: the prompt has no tokens")
    return tuple(ids)


def example_of(
    asked: TrainingPrompt, tokenizer: Any, eos_token_ids: Sequence[int], max_length: int, *, is_raw: bool = False
) -> Example:
    """Return a prompt and its answer as token ids, with EOS if the answer ended, cut to ``max_length`` tokens."""
    prompt = prompt_ids(asked, tokenizer, is_raw=is_raw)
    answer = tuple(tokenizer(asked.answer or "", add_special_tokens=False)["input_ids"])
    if asked.ended:
        answer += (_end_of(tokenizer, eos_token_ids),)
    return Example((*prompt, *answer)[:max_length], min(len(prompt), max_length), key_of((*prompt, *answer)))


def key_of(parts: Iterable[int | str]) -> str:
    """Return a short hash of token ids, or of the keys of several examples."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def _end_of(tokenizer: Any, eos_token_ids: Sequence[int]) -> int:
    own = tokenizer.eos_token_id
    return int(own) if own in eos_token_ids or not eos_token_ids else eos_token_ids[0]


@cache
def evaluation_digests() -> frozenset[str]:
    """Return digests of the prompts of common evaluation sets: Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K."""
    text = (resources.files("foredraft.train") / "evaluation_sets.txt").read_text(encoding="ascii")
    return frozenset(text.split())


def is_evaluation(text: str) -> bool:
    """Return whether a prompt is in an evaluation set, ignoring blanks and case. Prompts of an evaluation set are never
    trained on."""
    return prompt_digest(text) in evaluation_digests()


def prompt_digest(text: str) -> str:
    """Return the digest of a prompt, ignoring blanks and case: 12 hexadecimal digits."""
    return hashlib.sha256(" ".join(text.split()).lower().encode()).hexdigest()[:12]


def is_held_out(digest: str, one_in: int) -> bool:
    """Return whether a prompt is held out, by the hash of its text, so that order and selection have no influence."""
    return int(digest[:8], 16) % one_in == 0
