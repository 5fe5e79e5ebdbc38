"""The arguments that all classic functions share, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.classic.reader import Readable
from foredraft.config.keywords import whole_number
from foredraft.config.sampling import SamplingParams
from foredraft.engine.row import as_ids, check_prompt
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """One prompt and where its output ends.

    Args:
      prompt: token ids.
      max_length: prompt and output together never exceed it.
      eos_token_ids: tokens that end the output; the one found is part of it.
    """

    prompt: tuple[int, ...]
    max_length: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Sequence[int], model: Readable, max_gen_len: int, eos_tokens_id: int | Iterable[int]
    ) -> Request:
        """Check the arguments of a call.

        Raises: PromptError for an empty or malformed prompt, or ids outside the vocabulary; ContextLengthError for
          one that fills the context; ConfigError for a negative ``max_gen_len`` or an end-of-sequence id that is none.
        """
        check_least("max_gen_len", max_gen_len, 0)
        prompt = as_ids(inputs)
        check_prompt(prompt, model.num_embeddings, model.context_length)
        max_length = len(prompt) + max_gen_len
        if model.context_length is not None:
            max_length = min(max_length, model.context_length)
        return cls(tuple(prompt), max_length, _eos_ids(eos_tokens_id))

    def new_checker(self) -> StopChecker:
        """Tells token by token where the output ends."""
        return StopChecker(SamplingParams(), self.eos_token_ids, len(self.prompt), self.max_length)


def check_least(name: str, value: int, least: int) -> None:
    """Raises: ConfigError when a number is too small, or none."""
    try:
        is_least = whole_number(value) >= least
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more") from None
    if not is_least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def _eos_ids(eos_tokens_id: int | Iterable[int]) -> tuple[int, ...]:
    """Ids that output is compared with, as described; one that the model cannot say, such as -1, ends none."""
    is_one = not isinstance(eos_tokens_id, Iterable) or getattr(eos_tokens_id, "ndim", 1) == 0
    given: Any = (eos_tokens_id,) if is_one else eos_tokens_id
    try:
        return tuple(map(whole_number, given))
    except (TypeError, ValueError):
        raise ConfigError(
            f"eos_tokens_id is {eos_tokens_id!r}; give a token id or a list of them, [] or -1 for none"
        ) from None
