"""What a user may ask for: how tokens are sampled, and how they are drafted. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from foretoken.engine.errors import ConfigError

MIN_TEMPERATURE = 1e-5
"""Smallest temperature other than 0; below it, dividing float32 logits tells nothing that greedy does not."""

T = TypeVar("T")


def _unknown_key(owner: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist; it names the nearest one."""
    names = sorted(known)
    near = get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return ConfigError(f"{owner} has no key {key!r}; {hint}")


def _canonical(
    owner: str, given: Mapping[str, Any], fields: Iterable[str], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """The given keys under their own names.

    Raises: ConfigError for an unknown key, and for two spellings of one key with different values.
    """
    names = frozenset(fields)
    spelled: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key if key in names else aliases.get(key)
        if name is None:
            raise _unknown_key(owner, key, names | aliases.keys())
        if name in values and not _same(values[name], value):
            raise ConfigError(
                f"{owner} got {spelled[name]}={values[name]!r} and {key}={value!r}, two names of one key; give one"
            )
        spelled[name], values[name] = key, value
    return values


def _respelled(owner: str, given: Mapping[str, Any], normal: Callable[[str], str]) -> dict[str, Any]:
    """The given keys, dashes and the like made regular."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = normal(key)
        if name in values and not _same(values[name], value):
            raise ConfigError(f"{owner} got {name} twice, as {values[name]!r} and as {value!r}; give it once")
        values[name] = value
    return values


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in (bool, int, float, str) and type(b) in (bool, int, float, str) and a == b)


def _strict_keywords(
    aliases: Mapping[str, str],
    normal: Callable[[str], str] = str,
    implied: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Class decorator: a dataclass whose constructor takes aliases and names the nearest known key.

    ``implied`` holds aliases that say more than their value: other keys, set where they are not given.
    """

    def decorate(cls: type[T]) -> type[T]:
        generated = cls.__init__
        names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]

        @functools.wraps(generated)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            given = _respelled(cls.__name__, kwargs, normal)
            values = _canonical(cls.__name__, given, names, aliases)
            for alias in given.keys() & (implied or {}).keys():
                values = {**(implied or {})[alias], **values}
            twice = set(names[: len(args)]) & values.keys()
            if twice:
                raise ConfigError(f"{cls.__name__} got {sorted(twice)} both by place and by name; give each once")
            generated(self, *args, **values)

        cls.__init__ = init  # type: ignore[method-assign]
        return cls

    return decorate


def _integer(owner: str, name: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> int:
    """The value as an int within the limits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a whole number{_and(remedy)}") from None
    if number < low or (high is not None and number > high):
        limit = f"{low} or more" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{owner}.{name} is {number}; it must be {limit}{_and(remedy)}")
    return number


def _real(
    owner: str,
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    remedy: str = "",
) -> float:
    """The value as a finite float within the limits; ``above`` excludes the lower one."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a number{_and(remedy)}") from None
    if not math.isfinite(number) or number > high or number < low or (above and number == low):
        edge = "greater than" if above else "at least"
        limit = f"{edge} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        raise ConfigError(f"{owner}.{name} is {number}; it must be finite, {limit}{_and(remedy)}")
    return number


def _and(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def _strings(owner: str, name: str, value: str | Iterable[Any] | None) -> tuple[str, ...]:
    """One string or several as a tuple without empty ones."""
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"{owner}.{name} holds {string!r}; every entry must be a non-empty string")
    return strings


SAMPLING_ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
    "bad_words_token_ids": "bad_words_ids",
    "logits_processor": "logits_processors",
}
"""Names of transformers and of the OpenAI API for fields of `SamplingParams`."""


@_strict_keywords(SAMPLING_ALIASES)
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen: vLLM's names and defaults, HF's order of processors.

    Args:
      n: samples per prompt; sample i has the seed ``mix(seed, i)``.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_p: nucleus mass kept, in (0, 1]; 1 is off.
      top_k: most likely tokens kept, ties included; 0 or -1 is off.
      min_p: tokens below this fraction of the most likely one's probability are dropped; 0 is off.
      typical_p: mass of locally typical tokens kept, in (0, 1]; 1 is off.
      presence_penalty: subtracted once from tokens that the output holds; -2..2.
      frequency_penalty: subtracted as often as the output holds the token; -2..2.
      repetition_penalty: divides positive and multiplies negative logits of tokens seen so far,
        prompt included; 1 is off.
      no_repeat_ngram_size: n-grams of this size occur once in prompt and output; 0 is off.
      stop: string or strings that end the output.
      stop_token_ids: tokens that end the output, beside EOS.
      include_stop_str_in_output: keep the stop string in the text.
      min_tokens: EOS and stop tokens are impossible before that many output tokens.
      max_tokens: output budget, None for up to the context. Alias: ``max_new_tokens``.
      logit_bias: token id -> number added to its logit, -inf to ban it.
      bad_words: strings that may not occur; the front door resolves them with the tokenizer.
      bad_words_ids: token sequences that may not occur.
      seed: 0..2**64-1; None (or -1) draws one per request, which is reported.
      logprobs: None, or how many most likely tokens are returned with every token, 0 for its own only.
      ignore_eos: EOS does not end the output.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: produce text; stop strings need it.
      logits_processors: callables (input_ids [1, T], scores [1, V]) -> scores, as of transformers. They
        must be functions of their arguments alone: drafts show them prefixes that may not come to be.

    Raises: ConfigError for an unknown field or a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    bad_words: str | Sequence[str] | None = ()
    bad_words_ids: Sequence[Sequence[int]] | None = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: Sequence[Callable[..., Any]] | None = ()

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_budget()
        self._set("stop", _strings("SamplingParams", "stop", self.stop))
        self._set("bad_words", _strings("SamplingParams", "bad_words", self.bad_words))
        self._set("stop_token_ids", tuple(self._token("stop_token_ids", t) for t in self.stop_token_ids or ()))
        self._set("bad_words_ids", tuple(self._token_sequence(words) for words in self.bad_words_ids or ()))
        self._set("logit_bias", self._checked_bias())
        self._check_processors()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be True or False")
        if self.stop and not self.detokenize:
            raise ConfigError(
                f"SamplingParams.stop={self.stop} needs text; leave detokenize=True or use stop_token_ids"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as a JSON object; same names, same errors."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"sampling parameters are {type(values).__name__}; give a mapping of names to values")
        return cls(**{str(key): value for key, value in values.items()})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def max_new_tokens(self) -> int | None:
        """transformers' name of ``max_tokens``."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, always as a tuple."""
        return tuple(self.stop or ())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        real = functools.partial(_real, "SamplingParams")
        temperature = real("temperature", self.temperature, 0.0, remedy="0 is greedy decoding")
        if 0.0 < temperature < MIN_TEMPERATURE:
            raise ConfigError(f"SamplingParams.temperature is {temperature}, below {MIN_TEMPERATURE}; use 0 for greedy")
        self._set("temperature", temperature)
        self._set("top_p", real("top_p", self.top_p, 0.0, 1.0, above=True, remedy="1 turns it off"))
        self._set("min_p", real("min_p", self.min_p, 0.0, 1.0, remedy="0 turns it off"))
        self._set("typical_p", real("typical_p", self.typical_p, 0.0, 1.0, above=True, remedy="1 turns it off"))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, real(name, getattr(self, name), -2.0, 2.0, remedy="0 turns it off"))
        self._set(
            "repetition_penalty",
            real("repetition_penalty", self.repetition_penalty, 0.0, above=True, remedy="1 turns it off"),
        )

    def _check_budget(self) -> None:
        whole = functools.partial(_integer, "SamplingParams")
        self._set("n", whole("n", self.n, 1))
        self._set("top_k", max(0, whole("top_k", self.top_k, -1, remedy="0 or -1 turns it off")))
        self._set("no_repeat_ngram_size", whole("no_repeat_ngram_size", self.no_repeat_ngram_size, 0))
        self._set("min_tokens", whole("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None:
            self._set("max_tokens", whole("max_tokens", self.max_tokens, 1, remedy="None means up to the context"))
            if self.min_tokens > self.max_tokens:
                raise ConfigError(
                    f"SamplingParams.min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                    "lower the first or raise the second"
                )
        if self.logprobs is not None:
            self._set("logprobs", whole("logprobs", self.logprobs, 0, remedy="None turns them off"))
        if self.seed is not None:
            seed = whole("seed", self.seed, -1, 2**64 - 1, remedy="None draws one per request")
            self._set("seed", None if seed == -1 else seed)

    def _token(self, name: str, token: Any) -> int:
        return _integer("SamplingParams", name, token, 0, remedy="token ids are not negative")

    def _token_sequence(self, words: Any) -> tuple[int, ...]:
        if not isinstance(words, Sequence) or isinstance(words, str) or not words:
            raise ConfigError(f"SamplingParams.bad_words_ids holds {words!r}; every entry must be a list of token ids")
        return tuple(self._token("bad_words_ids", token) for token in words)

    def _checked_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"SamplingParams.logit_bias is {self.logit_bias!r}; give a mapping of token id to number")
        bias = {}
        for key, value in self.logit_bias.items():
            token = self._token("logit_bias", int(key) if isinstance(key, str) and key.isdecimal() else key)
            number = (
                float("-inf") if value == float("-inf") else _real("SamplingParams", "logit_bias", value, -math.inf)
            )
            bias[token] = number
        return bias

    def _check_processors(self) -> None:
        processors = tuple(self.logits_processors or ())
        for processor in processors:
            if not callable(processor):
                raise ConfigError(
                    f"SamplingParams.logits_processors holds {processor!r}; every entry must be callable as "
                    "processor(input_ids, scores)"
                )
        self._set("logits_processors", processors)


@dataclass(frozen=True)
class Method:
    """What one way of drafting understands.

    Args:
      keys: the keys of `SpeculativeConfig` that have a meaning for it.
      num_speculative_tokens: default draft length.
      defaults: defaults of other keys that depend on the method.
    """

    keys: frozenset[str]
    num_speculative_tokens: int
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMON_KEYS = frozenset({"num_speculative_tokens", "rejection_sample_method", "length_policy", "max_draft_nodes"})

METHODS: dict[str, Method] = {
    "none": Method(keys=frozenset(), num_speculative_tokens=0),
    "draft_model": Method(
        keys=_COMMON_KEYS | {"model", "revision", "dtype", "draft_sample_method", "num_draft_branches"},
        num_speculative_tokens=5,
        defaults={"draft_sample_method": "probabilistic", "num_draft_branches": 1},
    ),
    "ngram": Method(
        keys=_COMMON_KEYS | {"prompt_lookup_min", "prompt_lookup_max", "num_prompt_lookup_candidates"},
        num_speculative_tokens=10,
        defaults={"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_prompt_lookup_candidates": 1},
    ),
    "nasd": Method(
        keys=_COMMON_KEYS | {"ngram_size", "filler_top_k", "num_draft_branches"},
        num_speculative_tokens=5,
        defaults={"ngram_size": 4, "filler_top_k": 3, "num_draft_branches": 1},
    ),
}
"""The table of methods; defaults of a method stand here and nowhere else."""

METHOD_ALIASES = {
    "prompt_lookup": "ngram",
    "prompt_lookup_decoding": "ngram",
    "ngram_simple": "ngram",
    "draft": "draft_model",
    "draft_simple": "draft_model",
    "assisted": "draft_model",
    "standalone": "draft_model",
    "ngram_storage": "nasd",
    "ngram_assisted": "nasd",
    "off": "none",
    "disabled": "none",
}

SPECULATIVE_ALIASES = {
    # transformers
    "assistant_model": "model",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "max_matching_ngram_size": "prompt_lookup_max",
    "num_assistant_tokens_schedule": "length_policy",
    # SGLang
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_model_revision": "revision",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_num_draft_tokens": "max_draft_nodes",
    "speculative_eagle_topk": "num_draft_branches",
    "speculative_ngram_min_match_window_size": "prompt_lookup_min",
    "speculative_ngram_max_match_window_size": "prompt_lookup_max",
    # llama.cpp
    "spec_type": "method",
    "md": "model",
    "model_draft": "model",
    "spec_draft_model": "model",
    "spec_draft_n_max": "num_speculative_tokens",
    "draft": "num_speculative_tokens",
    "draft_n": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    "draft_n_max": "num_speculative_tokens",
    # mlx-lm, LM Studio
    "draft_model": "model",
    "num_draft_tokens": "num_speculative_tokens",
    # shorter or older spellings
    "drafter": "model",
    "draft_dtype": "dtype",
    "ngram_n": "ngram_size",
    "acceptance": "rejection_sample_method",
    "num_lookup_candidates": "num_prompt_lookup_candidates",
}
"""Names of other systems for keys of `SpeculativeConfig`. SGLang's ``num_draft_tokens`` counts nodes,
root included; vLLM's K and its kin count drafted tokens, the bonus not among them."""

_IMPLIED = {"prompt_lookup_num_tokens": {"method": "ngram"}}

_CHOICES = {
    "draft_sample_method": {"greedy": "greedy", "probabilistic": "probabilistic", "gumbel": "probabilistic"},
    "rejection_sample_method": {
        "match": "match",
        "standard": "standard",
        "rejection": "standard",
        "rejection_sampler": "standard",
        "block": "block",
    },
    "length_policy": {
        "fixed": "fixed",
        "constant": "fixed",
        "heuristic": "heuristic",
        "heuristic_transient": "heuristic",
    },
}
"""Values of the keys that choose by name, aliases included."""


def _spelling(key: str) -> str:
    """``--spec-draft-n-max`` -> ``spec_draft_n_max``."""
    return key.lstrip("-").replace("-", "_")


@_strict_keywords(SPECULATIVE_ALIASES, _spelling, _IMPLIED)
@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and accepted. Keys are vLLM's; those of other systems are aliases.

    A key left at None takes the default of the method, from the table `METHODS`. Keys without a meaning for
    the method stay None and may not be given.

    Args:
      method: ``draft_model``, ``ngram`` (prompt lookup), ``nasd`` (n-gram storage) or ``none``. Left out, it
        follows from the other keys: a model means ``draft_model``, a key of one method means that method.
      model: drafter of ``draft_model``: a path, a hub id, ``zoo:NAME`` or a loaded model; None where the
        target brings its own (``zoo:X``).
      num_speculative_tokens: longest draft, the bonus not counted.
      revision, dtype: of a drafter that is loaded by name.
      draft_sample_method: "greedy" or "probabilistic".
      rejection_sample_method: "match" (equal tokens for any draft), "standard" (rejection sampling), "block".
      num_draft_branches: siblings per drafted position; 1 is a chain.
      max_draft_nodes: limit of a draft tree, root included; None for what branches and length amount to.
      length_policy: "fixed" or "heuristic".
      prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that is looked up.
      num_prompt_lookup_candidates: continuations that are merged into one tree.
      ngram_size: n of the n-gram storage, the predicted token included.
      filler_top_k: how many of the target's most likely tokens enter the storage per verified position.

    Raises: ConfigError for an unknown key, a value out of range, or a key that does not belong to the method.
    """

    method: str | None = None
    model: Any = None
    num_speculative_tokens: int | None = None
    revision: str | None = None
    dtype: Any = None
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None
    num_draft_branches: int | None = None
    max_draft_nodes: int | None = None
    length_policy: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    num_prompt_lookup_candidates: int | None = None
    ngram_size: int | None = None
    filler_top_k: int | None = None

    def __post_init__(self) -> None:
        name = self._method_name()
        self._set("method", name)
        self._check_keys(name)
        self._fill_defaults(METHODS[name])
        for key, choices in _CHOICES.items():
            self._set(key, self._choice(key, choices))
        self._check_ranges()
        self._check_acceptance()

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Read what a user gave: nothing, a mapping, JSON, ``@file`` with JSON, a method's name, or a config.

        Raises: ConfigError when it is none of these, or not valid.
        """
        if value is None:
            return cls(method="none")
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = _read_text(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative config is {value!r}; give a JSON object, a mapping, @FILE or None")
        return cls(**{str(key): item for key, item in value.items()})

    @property
    def is_speculative(self) -> bool:
        return self.method != "none"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _given(self) -> set[str]:
        return {f.name for f in dataclasses.fields(self) if f.name != "method" and getattr(self, f.name) is not None}

    def _method_name(self) -> str:
        """The method, under its own name; inferred from the keys where it was left out."""
        if self.method is None:
            return self._inferred_method()
        if not isinstance(self.method, str):
            raise ConfigError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        name = _spelling(self.method).lower()
        name = METHOD_ALIASES.get(name, name)
        if name not in METHODS:
            near = get_close_matches(name, [*METHODS, *METHOD_ALIASES], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"method {self.method!r} is not known; {hint}choose one of {', '.join(METHODS)}")
        return name

    def _inferred_method(self) -> str:
        special = self._given() - _COMMON_KEYS
        fitting = [name for name, method in METHODS.items() if special and special <= method.keys]
        if len(fitting) != 1:
            raise ConfigError(
                f"the method does not follow from the keys {sorted(self._given())}; add method, one of "
                f"{', '.join(METHODS)}"
            )
        return fitting[0]

    def _check_keys(self, name: str) -> None:
        for key in sorted(self._given() - METHODS[name].keys):
            owners = [other for other, method in METHODS.items() if key in method.keys]
            raise ConfigError(
                f"key {key!r} has no meaning for method {name!r}, only for {', '.join(owners)}; leave it out"
            )

    def _fill_defaults(self, method: Method) -> None:
        defaults = {
            "num_speculative_tokens": method.num_speculative_tokens,
            "rejection_sample_method": "match",
            "length_policy": "fixed",
            **method.defaults,
        }
        self._order_lookup(defaults)
        for key, value in defaults.items():
            if getattr(self, key) is None:
                self._set(key, value)

    def _order_lookup(self, defaults: dict[str, Any]) -> None:
        """A single bound of the lookup moves the other one's default along."""
        if "prompt_lookup_min" not in defaults:
            return
        if isinstance(self.prompt_lookup_max, int):
            defaults["prompt_lookup_min"] = min(defaults["prompt_lookup_min"], self.prompt_lookup_max)
        if isinstance(self.prompt_lookup_min, int):
            defaults["prompt_lookup_max"] = max(defaults["prompt_lookup_max"], self.prompt_lookup_min)

    def _choice(self, key: str, choices: Mapping[str, str]) -> str | None:
        value = getattr(self, key)
        if value is None:
            return None
        name = choices.get(_spelling(value).lower()) if isinstance(value, str) else None
        if name is None:
            raise ConfigError(f"{key} is {value!r}; choose one of {', '.join(dict.fromkeys(choices.values()))}")
        return name

    def _check_ranges(self) -> None:
        lowest = {
            "num_speculative_tokens": 0,
            "num_draft_branches": 1,
            "max_draft_nodes": 2,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 1,
            "num_prompt_lookup_candidates": 1,
            "ngram_size": 2,
            "filler_top_k": 1,
        }
        for key, low in lowest.items():
            value = getattr(self, key)
            if value is not None:
                self._set(key, _integer("SpeculativeConfig", key, value, low))
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}; lower the first or "
                "raise the second"
            )

    def _check_acceptance(self) -> None:
        """Refuse rules that are not exact for the drafts this config makes.

        "match" takes any draft. "standard" takes samples of a known law, and deterministic drafts, whose
        tokens are point masses. "block" takes chains only.
        """
        widest = max(self.num_draft_branches or 1, self.num_prompt_lookup_candidates or 1)
        if self.rejection_sample_method == "block" and widest > 1:
            raise ConfigError(
                f"rejection_sample_method='block' takes chains, and this config drafts {widest} branches; "
                "use 'match' or 'standard', or one branch"
            )


def _read_text(text: str) -> Any:
    """JSON, the JSON in ``@file``, or the bare name of a method."""
    source = "speculative config"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"speculative config {source!r} cannot be read: {error.strerror}; check the path"
            ) from None
    name = _spelling(text.strip()).lower()
    if name in METHODS or name in METHOD_ALIASES:
        return {"method": name}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{source} is not valid JSON: {error}; write for instance {{"method": "ngram"}}') from None
