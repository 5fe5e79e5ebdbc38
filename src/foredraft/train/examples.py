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
"""Names of files of prompts that are read."""


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt as a file has it.

    Args:
      text: one turn of a user, or the text itself for a model without a chat template.
      place: file and line, for messages.
      answer: of the target; None where it is still to be made.
      ended: False where the answer was cut.
    """

    text: str
    place: str
    answer: str | None = None
    ended: bool = True

    @property
    def digest(self) -> str:
        """SHA-256 of the text: what tells held-out prompts from others, whatever their order."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Example:
    """A text of the target: a prompt, and what the target said to it.

    Args:
      token_ids: of both.
      prompt_length: how many of them the prompt has; losses count for the others.
      key: names the example.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    key: str

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """Prompts of a file, or of all files of a folder: a prompt per line of a .txt, or JSON lines, xz-compressed or not.

    JSON has ``prompt``, ``text`` or ``turns``, of which the first is taken; and ``answer`` and ``ended`` where the
    target has answered already.

    Raises: PromptError for what cannot be read, a line without a prompt, or a file without any.
    """
    path = path.expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise PromptError(f"{path} holds no files of prompts; want names that end in {', '.join(SUFFIXES)}")
    else:
        files = [path]
    found = [_asked(line) for file in files for line in read_prompts_file(file)]
    if not found:
        raise PromptError(f"{path} holds no prompts; give one per line")
    return found


def _asked(line: PromptLine) -> TrainingPrompt:
    answer, ended = line.keys.get("answer"), line.keys.get("ended", True)
    if not line.text.strip():
        raise PromptError(
            f"{line.place} holds no prompt; give prompt, text or turns (a list of text) that is not empty"
        )
    if not (answer is None or isinstance(answer, str)) or not isinstance(ended, bool):
        raise PromptError(
            f"{line.place}: answer must be text and ended true or false; leave answer out to have it made"
        )
    check_unicode(line.text, line.place)
    return TrainingPrompt(line.text, line.place, answer, ended)


def prompt_ids(asked: TrainingPrompt, tokenizer: Any, *, is_raw: bool = False) -> tuple[int, ...]:
    """A prompt as the target gets it: through its chat template where it has one, and nobody asks otherwise."""
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
    """A prompt and its answer as token ids, with EOS where the answer ended, cut to ``max_length`` tokens."""
    prompt = prompt_ids(asked, tokenizer, is_raw=is_raw)
    answer = tuple(tokenizer(asked.answer or "", add_special_tokens=False)["input_ids"])
    if asked.ended:
        answer += (_end_of(tokenizer, eos_token_ids),)
    return Example((*prompt, *answer)[:max_length], min(len(prompt), max_length), key_of((*prompt, *answer)))


def key_of(parts: Iterable[int | str]) -> str:
    """Names a text by its tokens, or several texts by their names."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def _end_of(tokenizer: Any, eos_token_ids: Sequence[int]) -> int:
    own = tokenizer.eos_token_id
    return int(own) if own in eos_token_ids or not eos_token_ids else eos_token_ids[0]


@cache
def evaluation_digests() -> frozenset[str]:
    """Digests of the prompts of sets that drafters are compared on: Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K."""
    text = (resources.files("foredraft.train") / "evaluation_sets.txt").read_text(encoding="ascii")
    return frozenset(text.split())


def is_evaluation(text: str) -> bool:
    """Whether a prompt is one of an evaluation set, up to blanks and capitals; such prompts are never trained on."""
    return prompt_digest(text) in evaluation_digests()


def prompt_digest(text: str) -> str:
    """Digest of a prompt, whatever its blanks and capitals: 12 hexadecimal digits."""
    return hashlib.sha256(" ".join(text.split()).lower().encode()).hexdigest()[:12]


def is_held_out(digest: str, one_in: int) -> bool:
    """Whether a prompt is kept from training: by the hash of its text, so that no order or selection changes it."""
    return int(digest[:8], 16) % one_in == 0
