"""The arguments that all classic functions share, with checks."""

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
    """One prompt and the limits of its output.

    Args:
      prompt: token ids.
      max_length: largest length of prompt and output together.
      eos_token_ids: tokens that end the output. The EOS token is part of the output.
    """

    prompt: tuple[int, ...]
    max_length: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Sequence[int], model: Readable, max_gen_len: int, eos_tokens_id: int | Iterable[int]
    ) -> Request:
        """Check the arguments of a call, and return the request.

        Raises: PromptError for an empty or malformed prompt, or ids outside the vocabulary; ContextLengthError for a
          prompt that fills the context; ConfigError for a negative ``max_gen_len`` or an invalid EOS id.
        """
        check_least("max_gen_len", max_gen_len, 0)
        prompt = as_ids(inputs)
        check_prompt(prompt, model.num_embeddings, model.context_length)
        max_length = len(prompt) + max_gen_len
        if model.context_length is not None:
            max_length = min(max_length, model.context_length)
        return cls(tuple(prompt), max_length, _eos_ids(eos_tokens_id))

    def new_checker(self) -> StopChecker:
        """Return a checker that finds the end of the output token by token."""
        return StopChecker(SamplingParams(), self.eos_token_ids, len(self.prompt), self.max_length)


def check_least(name: str, value: int, least: int) -> None:
    """Raise ConfigError if a number is too small or not a whole number."""
    try:
        is_least = whole_number(value) >= least
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more") from None
    if not is_least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def _eos_ids(eos_tokens_id: int | Iterable[int]) -> tuple[int, ...]:
    """Return the EOS ids. An id outside the vocabulary, such as -1, never ends the output."""
    is_one = not isinstance(eos_tokens_id, Iterable) or getattr(eos_tokens_id, "ndim", 1) == 0
    given: Any = (eos_tokens_id,) if is_one else eos_tokens_id
    try:
        return tuple(map(whole_number, given))
    except (TypeError, ValueError):
        raise ConfigError(
            f"eos_tokens_id is {eos_tokens_id!r}; use a token id or a list of token ids, or [] or -1 for none"
        ) from None
