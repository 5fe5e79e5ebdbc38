"""Prompts and parameters as a user gives them, turned into token ids and one set of parameters each."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from foredraft.config.keywords import check_unicode, whole_number
from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, PromptError, described
from foredraft.law.noise import mix

_SEED_BITS = 53  # of drawn seeds, so that every JSON reader can report and repeat them

PromptLike: TypeAlias = str | Mapping[str, Any] | Seq[int]
Prompts: TypeAlias = PromptLike | Seq[PromptLike]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, its text where it was given as text, what its samples have said already, and its salt."""

    token_ids: tuple[int, ...]
    text: str | None = None
    output_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None


def read_prompts(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """One prompt or several, as text, token ids, or mappings.

    Mappings have ``prompt`` or ``prompt_token_ids``, and perhaps ``output_ids`` and ``cache_salt``.

    Raises: PromptError, naming the prompt by its place.
    """
    listed = [prompts] if is_single(prompts) else list(cast(Iterable[Any], prompts))
    return [read_prompt(prompt, tokenizer, place) for place, prompt in enumerate(listed)]


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt. A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, (bytes, int, float)) or not isinstance(prompts, Iterable):
        raise PromptError(f"the prompt is {prompts!r}; give text, token ids, a mapping, or a list of these")
    first = next(iter(prompts), None)
    return first is not None and not isinstance(first, (str, Mapping)) and not _is_list(first)


def read_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, place: int = 0) -> Prompt:
    """One prompt as token ids."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "output_ids", "cache_salt"}
        if unknown or not prompt:
            raise PromptError(f"prompt {place} has the keys {sorted(prompt)}; give prompt (text) or prompt_token_ids")
        if (said := prompt.get("output_ids")) is not None:
            begun = read_prompt({key: prompt[key] for key in prompt if key != "output_ids"}, tokenizer, place)
            listed = list(said) if said and _is_list(next(iter(said))) else [said]
            return replace(begun, output_ids=tuple(_ids(ids, place) if len(ids) else () for ids in listed))
        if (salt := prompt.get("cache_salt")) is not None:
            if not isinstance(salt, str) or not salt:
                raise PromptError(f"prompt {place} has the cache_salt {salt!r}; give a text, or leave it out")
            rest = {key: prompt[key] for key in prompt if key != "cache_salt"}
            return replace(read_prompt(rest, tokenizer, place), cache_salt=salt)
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        if ids is not None:
            return Prompt(_ids(ids, place), text)
        prompt = text
    if not isinstance(prompt, str):
        return Prompt(_ids(prompt, place))
    if tokenizer is None:
        raise PromptError(
            f"prompt {place} is text, but this model has no tokenizer; put its files beside the weights, pass "
            "tokenizer=... to LLM, or give prompt_token_ids (on the command line in --prompts-file)"
        )
    check_unicode(prompt, f"prompt {place}")
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    if not ids:
        raise PromptError(f"prompt {place} is empty: {prompt!r} has no tokens; give some text, or the BOS token")
    return Prompt(tuple(ids), prompt)


def chat_prompt(tokenizer: PreTrainedTokenizerBase | None, messages: Any, **template_options: Any) -> dict[str, Any]:
    """One conversation through the chat template, as text and as token ids.

    Raises: ConfigError when there is no template.
    """
    text = chat_text(tokenizer, messages, **template_options)
    assert tokenizer is not None
    return {"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]}


def chat_text(tokenizer: PreTrainedTokenizerBase | None, messages: Any, **template_options: Any) -> str:
    """One conversation through the chat template.

    Raises: ConfigError when there is no template, or one that is not Jinja; PromptError for messages that it does not
      take, as a system message in templates that know none.
    """
    if tokenizer is None or not tokenizer.chat_template:
        lacks = "tokenizer, and so no chat template" if tokenizer is None else "chat template"
        raise ConfigError(
            f"this model has no {lacks}; give plain prompts (foredraft generate), or put a tokenizer with a "
            "chat_template.jinja beside the weights"
        )
    options = {"add_generation_prompt": True, **template_options}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of the model cannot be read ({error}, line {error.lineno}); mend chat_template.jinja "
            "beside the weights, or give plain prompts (on the command line --raw)"
        ) from error
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        said = str(error) if isinstance(error, TemplateError) else described(error)
        raise PromptError(f"the chat template of the model does not take these messages: {said}") from error
    except RecursionError as error:
        raise PromptError("the messages or tools are nested too deeply; make them flatter") from error


def _ids(value: Any, place: int) -> tuple[int, ...]:
    if not _is_list(value):
        raise PromptError(f"prompt {place} is {type(value).__name__}; give text or a list of token ids")
    try:
        ids = tuple(map(whole_number, value))
    except TypeError:
        wrong = next(token for token in value if not _is_index(token))
        raise PromptError(f"prompt {place} holds {wrong!r}; token ids are whole numbers") from None
    if not ids:
        raise PromptError(f"prompt {place} is empty: it has no token ids; give at least one (the BOS token, perhaps)")
    return ids


def _is_index(value: Any) -> bool:
    try:
        whole_number(value)
    except TypeError:
        return False
    return True


def _is_list(value: Any) -> bool:
    """Lists, tuples, arrays and tensors with a dimension."""
    return (
        isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) and getattr(value, "ndim", 1) > 0
    )


def read_params(
    params: SamplingParams | Mapping[str, Any] | Seq[SamplingParams] | None,
    num_prompts: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[SamplingParams]:
    """Parameters for every prompt, with ``bad_words`` and ``prediction`` as token ids.

    Raises: ConfigError when there are not as many as prompts, or when text is needed and there is no tokenizer.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, Mapping):
        params = SamplingParams.from_dict(params)
    if isinstance(params, SamplingParams):
        return [resolved(params, tokenizer)] * num_prompts
    listed = list(params)
    if len(listed) != num_prompts:
        raise ConfigError(f"{len(listed)} sampling parameters for {num_prompts} prompts; give one, or one for each")
    for item in listed:
        if not isinstance(item, SamplingParams):
            raise ConfigError(f"sampling_params holds {type(item).__name__}; every entry must be SamplingParams")
    return [resolved(item, tokenizer) for item in listed]


def seeded(params: SamplingParams, seed: int | None, number: int) -> SamplingParams:
    """The parameters of request ``number`` with a seed that can be reported and given again.

    Randomness: their own seed if they have one, else one from that of the LLM and the number, else a fresh one.
    """
    if params.seed is not None:
        return params
    if seed is None:
        return replace(params, seed=secrets.randbits(_SEED_BITS))
    return replace(params, seed=mix(seed, number) >> (64 - _SEED_BITS))


_WITHOUT_TEXT = {"stop": "use stop_token_ids", "bad_words": "use bad_words_ids", "prediction": "give token ids"}


def resolved(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> SamplingParams:
    """Parameters with ``bad_words`` and ``prediction`` as token ids; resolving twice changes nothing.

    Raises: ConfigError when text is needed and there is no tokenizer.
    """
    for name, remedy in _WITHOUT_TEXT.items():
        given = getattr(params, name)
        if given and tokenizer is None and (name != "prediction" or isinstance(given, str)):
            raise ConfigError(
                f"SamplingParams.{name} is text, but this model has no tokenizer; pass tokenizer=... to LLM, or "
                f"{remedy}"
            )
    if tokenizer is None:
        return params
    if isinstance(text := params.prediction, str):
        check_unicode(text, "prediction")
        predicted = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        params = replace(params, prediction=tuple(predicted))
    if not params.bad_words:
        return params
    banned = [ids for word in params.bad_words for ids in spellings(word, tokenizer)]
    return replace(params, bad_words=(), bad_words_ids=(*(params.bad_words_ids or ()), *banned))


def spellings(word: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Token sequences of a word at the start of a text and after a space, without repeats."""
    check_unicode(word, f"bad word {word!r}")
    found = []
    for text in (word, " " + word.lstrip()):
        ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if ids and ids not in found:
            found.append(ids)
    return found
