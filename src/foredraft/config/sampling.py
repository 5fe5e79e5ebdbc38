"""Sampling parameters: `SamplingParams`. Unknown keys raise errors. For drafting, see `SpeculativeConfig`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.config.keywords import has_items, integer, listed, real, strings, takes_aliases
from foredraft.config.options import flag, number, option, read_fields, whole
from foredraft.config.structured import StructuredOutputs
from foredraft.errors import ConfigError

MIN_TEMPERATURE = 1e-5
"""Smallest temperature other than 0. In float32, sampling at a lower temperature is the same as greedy decoding."""

MAX_DIGITS = 20
"""Limit on digits of a token id that is given as text. Python converts no more than 4,300 digits to a number."""

MAX_NAMED = 10
"""Limit on token ids that an error message lists."""


class UnsetFloat(float):
    """Default of a float parameter that the caller has not set, so that the model's own default can replace it.

    The type survives ``dataclasses.replace``, copies and pickles. A number that a caller gives is a plain float, even
    if its value equals the default.
    """


class UnsetInt(int):
    """Default of an integer parameter that the caller has not set; see `UnsetFloat`."""


MODEL_DEFAULTS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Keys of ``generation_config.json`` that are used as defaults of requests, as in vLLM, and the fields that they
set."""


_LIMITS = (
    *("bad_words_ids", "no_repeat_ngram_size", "logit_bias", "allowed_token_ids", "min_tokens", "logits_processors"),
    "structured_outputs",
)


class TokenIds(tuple[int, ...]):
    """Token ids that have been checked one by one. Parameters that are built from other parameters skip the check."""


_ONE_IS_OFF, _ZERO_IS_OFF, _NONE_IS_OFF = "1 turns it off", "0 turns it off", "None turns them off"


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and defaults and HF's order of processors.

    ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` and ``max_tokens`` have defaults in the
    model's ``generation_config.json``, if there is one. A field that is not set takes that default; see `LLM`.

    Args:
      n: number of samples per prompt. Sample i has the seed ``mix(seed, i)``.
      temperature: divisor of the logits. 0 is greedy decoding.
      top_p: nucleus mass that is kept, in (0, 1]. 1 turns it off.
      top_k: number of most likely tokens that are kept, ties included. 0 or -1 turns it off.
      min_p: smallest probability that is kept, as a fraction of the most likely token's probability. 0 turns it off.
      typical_p: mass of locally typical tokens that is kept, in (0, 1]. 1 turns it off.
      presence_penalty: number subtracted once from the logit of every token that the output contains, -2..2.
      frequency_penalty: number subtracted for every occurrence of the token in the output, -2..2.
      repetition_penalty: number that divides positive and multiplies negative logits of all tokens in the prompt and in
        the output. 1 turns it off.
      no_repeat_ngram_size: size of n-grams that may occur only once in prompt and output together. 0 turns it off.
      stop: string or strings that end the output.
      stop_token_ids: tokens that end the output, in addition to EOS.
      include_stop_str_in_output: keep the stop string in the text.
      min_tokens: number of output tokens before which EOS and stop tokens are impossible.
      max_tokens: limit on output tokens, or None for as many as the context allows. 0 only reads the prompt, and
        requires ``prompt_logprobs``. Alias: ``max_new_tokens``.
      logit_bias: mapping from token id to a number that is added to its logit. -inf bans the token.
      allowed_token_ids: the only tokens that may be chosen, None for all. EOS has to be listed as well.
      bad_words: strings that must not occur. `LLM` turns them into ``bad_words_ids`` with the tokenizer.
      bad_words_ids: token sequences that must not occur.
      seed: 0..2**64-1. None (or -1) draws a seed per request, which the result reports.
      logprobs: number of most likely tokens returned with every token, 0 for the chosen token only, None for none.
      logprob_token_ids: tokens whose log-probabilities are returned at every position, instead of those of the most
        likely tokens.
      prompt_logprobs: number of most likely tokens returned with every prompt token, 0 for the prompt token only, None
        for none. These log-probabilities are the model's own, before any processor, because prompt tokens are not
        sampled.
      prediction: text or token ids that the output is expected to resemble. The predicted tokens are drafted in
        addition to those of the drafter. The predictions affect the speed only. `LLM` turns text into tokens.
      structured_outputs: constraint of the output, as `StructuredOutputs` or a mapping of its fields.
      ignore_eos: continue after EOS.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: produce text. Stop strings require ``detokenize``.
      logits_processors: callables (input_ids [1, T], scores [1, V]) -> scores, as in transformers. Processors must be
        functions of their arguments alone, because verification calls them with prefixes that may be rejected later.
      num_speculative_tokens: longest draft for this request, 0 for plain decoding, None for the limit of the
        speculative config. Under "match" the number does not affect the tokens.

    Raises: ConfigError for an unknown field or a value out of range.
    """

    n: int = option(whole(1), 1)
    temperature: float = option(number(0.0, remedy="0 is greedy decoding"), UnsetFloat(1.0))
    top_p: float = option(number(0.0, 1.0, above=True, remedy=_ONE_IS_OFF), UnsetFloat(1.0))
    top_k: int = option(whole(-1, remedy="0 or -1 turns it off"), UnsetInt(0))
    min_p: float = option(number(0.0, 1.0, remedy=_ZERO_IS_OFF), UnsetFloat(0.0))
    typical_p: float = option(number(0.0, 1.0, above=True, remedy=_ONE_IS_OFF), 1.0)
    presence_penalty: float = option(number(-2.0, 2.0, remedy=_ZERO_IS_OFF), 0.0)
    frequency_penalty: float = option(number(-2.0, 2.0, remedy=_ZERO_IS_OFF), 0.0)
    repetition_penalty: float = option(number(0.0, above=True, remedy=_ONE_IS_OFF), UnsetFloat(1.0))
    no_repeat_ngram_size: int = option(whole(0), 0)
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = option(flag(), False)
    min_tokens: int = option(whole(0), 0)
    max_tokens: int | None = UnsetInt(16)
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    bad_words_ids: Sequence[Sequence[int]] | None = ()
    seed: int | None = option(whole(-1, 2**64 - 1, remedy="None draws one per request"))
    logprobs: int | None = option(whole(0, remedy=_NONE_IS_OFF))
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = option(whole(0, remedy=_NONE_IS_OFF))
    prediction: str | Sequence[int] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    ignore_eos: bool = option(flag(), False)
    skip_special_tokens: bool = option(flag(), True)
    detokenize: bool = option(flag(), True)
    logits_processors: Sequence[Callable[..., Any]] | None = ()
    num_speculative_tokens: int | None = option(whole(0, remedy=_NONE_IS_OFF))

    def __post_init__(self) -> None:
        for name, value in read_fields("sampling_params", self).items():
            self._set(name, value)
        self._check_limits()
        self._set("stop", strings("sampling_params", "stop", self.stop))
        self._set("bad_words", strings("sampling_params", "bad_words", self.bad_words))
        self._set("stop_token_ids", tuple(self._token("stop_token_ids", t) for t in self._listed("stop_token_ids")))
        self._set("bad_words_ids", tuple(self._token_sequence(words) for words in self._listed("bad_words_ids")))
        if self.prediction is not None and not isinstance(self.prediction, (str, TokenIds)):
            self._set("prediction", TokenIds(self._token("prediction", t) for t in self._listed("prediction")))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.logprob_token_ids is not None and not isinstance(self.logprob_token_ids, TokenIds):
            named = TokenIds(
                dict.fromkeys(self._token("logprob_token_ids", t) for t in self._listed("logprob_token_ids"))
            )
            if not named:
                raise ConfigError("logprob_token_ids is empty; name a token, or leave it out")
            self._set("logprob_token_ids", named)
        if self.logprob_token_ids is not None and self.logprobs is None:
            self._set("logprobs", 0)
        self._set("logit_bias", self._checked_bias())
        self._check_allowed()
        self._check_processors()
        if self.stop and not self.detokenize:
            raise ConfigError(f"stop={self.stop} needs text; leave detokenize=True or use stop_token_ids")

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build parameters from a mapping such as a JSON object, with the same names and errors as the constructor."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"sampling parameters are {type(values).__name__}; give a mapping of names to values")
        return cls(**{str(key): value for key, value in values.items()})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def max_new_tokens(self) -> int | None:
        """``max_tokens`` under the name that transformers uses."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    def clone(self) -> SamplingParams:
        """Return a copy, as vLLM's method does. Parameters are immutable; only code written for vLLM needs this."""
        return copy.copy(self)

    @property
    def limits(self) -> dict[str, Any]:
        """The fields that are set and can make tokens impossible, by name."""
        return {name: value for name in _LIMITS if (value := getattr(self, name)) not in (None, (), 0)}

    def filled(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return these parameters with defaults for the fields that the caller has not set.

        Args:
          defaults: values by field name, for fields in `MODEL_DEFAULTS`.

        Raises: ConfigError if a default contradicts a field that was set.
        """
        unset = {
            name: value for name, value in defaults.items() if isinstance(getattr(self, name), (UnsetFloat, UnsetInt))
        }
        return dataclasses.replace(self, **unset) if unset else self

    def explicit(self) -> SamplingParams:
        """Return the same parameters with every field marked as set, so that no default of a model replaces one."""
        plain = {name: getattr(self, name) for name in MODEL_DEFAULTS.values()}
        return self.filled(
            {
                name: (float if isinstance(value, UnsetFloat) else int)(value)
                for name, value in plain.items()
                if value is not None
            }
        )

    def _set(self, name: str, value: Any) -> None:
        if not isinstance(getattr(self, name), (UnsetFloat, UnsetInt)):
            object.__setattr__(self, name, value)

    def _check_limits(self) -> None:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ConfigError(f"temperature is {self.temperature}, below {MIN_TEMPERATURE}; use 0 for greedy decoding")
        self._set("top_k", max(0, self.top_k))
        if self.seed == -1:
            self._set("seed", None)
        if self.max_tokens is None:
            return
        least = 1 if self.prompt_logprobs is None else 0
        remedy = "None allows as many as fit into the context, and 0 works only with prompt_logprobs"
        self._set("max_tokens", integer("sampling_params", "max_tokens", self.max_tokens, least, remedy=remedy))
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )

    def _listed(self, name: str) -> tuple[Any, ...]:
        return listed("sampling_params", name, getattr(self, name))

    def _token(self, name: str, token: Any) -> int:
        return integer("sampling_params", name, token, 0, remedy="token ids are not negative")

    def _token_sequence(self, words: Any) -> tuple[int, ...]:
        tokens = tuple(self._token("bad_words_ids", token) for token in words) if has_items(words) else ()
        if not tokens:
            raise ConfigError(f"bad_words_ids contains {words!r}; every entry must be a list of at least one token id")
        return tokens

    def _checked_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias is {self.logit_bias!r}; give a mapping of token id to number")
        bias = {}
        for key, value in self.logit_bias.items():
            is_number = isinstance(key, str) and key.isdecimal() and len(key) <= MAX_DIGITS
            token = self._token("logit_bias", int(key) if is_number else key)
            number = (
                float("-inf") if value == float("-inf") else real("sampling_params", "logit_bias", value, -math.inf)
            )
            bias[token] = number
        return bias

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None or isinstance(self.allowed_token_ids, TokenIds):
            return
        allowed = {self._token("allowed_token_ids", token) for token in self._listed("allowed_token_ids")}
        if not allowed:
            raise ConfigError("allowed_token_ids is empty; name a token, or leave it out to allow all")
        self._set("allowed_token_ids", TokenIds(sorted(allowed)))

    def _check_processors(self) -> None:
        processors = self._listed("logits_processors")
        for processor in processors:
            if not callable(processor):
                raise ConfigError(
                    f"logits_processors contains {processor!r}; every entry must be callable as "
                    "processor(input_ids, scores)"
                )
        self._set("logits_processors", processors)


SamplingParams.__init__ = takes_aliases("sampling_params")(SamplingParams.__init__)  # type: ignore[method-assign]


def check_named_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ConfigError for a token outside the vocabulary, and for ``bad_words`` that are not tokenized yet."""
    if params.bad_words and not params.bad_words_ids:
        raise ConfigError(
            f"bad_words {params.bad_words} were not turned into tokens; give bad_words_ids, or a tokenizer"
        )
    named = {
        "logit_bias": [int(token) for token in params.logit_bias or ()],
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_ids": [token for words in params.bad_words_ids or () for token in words],
        "stop_token_ids": params.stop_token_ids or (),
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            more = f" and {len(outside) - MAX_NAMED} more" if len(outside) > MAX_NAMED else ""
            raise ConfigError(
                f"{name} contains token ids {outside[:MAX_NAMED]}{more}, outside the vocabulary, 0..{vocab_size - 1}; "
                "leave them out"
            )
