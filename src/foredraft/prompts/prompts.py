"""Conversion of a user's prompts and sampling parameters to token ids and one set of parameters per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from foredraft.config.keywords import check_unicode, has_items, ints_of, whole_number
from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, ForedraftError, PromptError, error_with_type
from foredraft.prompts.templates import TemplateFailure, rendered_chat
from foredraft.sampling.noise import mix

_SEED_BITS = 53  # size of random seeds; a float, and so every JSON parser, represents them exactly

PromptLike: TypeAlias = str | Mapping[str, Any] | Iterable[int]
Prompts: TypeAlias = PromptLike | Iterable[PromptLike]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
      token_ids: token ids of the prompt, at least one.
      text: text of the prompt; None if it was given as token ids.
      output_ids: existing output of each sample, to be continued; empty for a new request.
      cache_salt: salt of the prefix cache; None for no salt.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    output_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None


def read_prompts(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Read one prompt or several, given as text, token ids, or mappings.

    A mapping contains ``prompt`` or ``prompt_token_ids``, and optionally ``output_ids`` and ``cache_salt``.

    Raises: PromptError with the index of the prompt.
    """
    return [read_prompt(prompt, tokenizer, place) for place, prompt in enumerate(_separate(prompts))]


def _separate(prompts: Prompts) -> list[Any]:
    """Return the prompts of a call as a list. A flat list of numbers is a single prompt of token ids.

    An iterator is converted to a list first, because inspecting its first item consumes it.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not has_items(prompts):
        raise PromptError(f"the prompt is {prompts!r}; give text, token ids, a mapping, or a list of these")
    items = list(prompts)
    first = items[0] if items else None
    is_flat = first is not None and not isinstance(first, (str, Mapping)) and not has_items(first)
    return [items] if is_flat else items


def read_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, place: int = 0) -> Prompt:
    """Read one prompt.

    Args:
      prompt: text, token ids or a mapping.
      tokenizer: tokenizer of the model; None if it has none.
      place: index of the prompt, for messages.

    Raises: PromptError.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "output_ids", "cache_salt"}
        if unknown or not prompt:
            keys = sorted(map(str, prompt))
            raise PromptError(f"prompt {place} has the keys {keys}; give prompt (text) or prompt_token_ids")
        if (said := prompt.get("output_ids")) is not None:
            begun = read_prompt({key: prompt[key] for key in prompt if key != "output_ids"}, tokenizer, place)
            return replace(begun, output_ids=_output_ids(said, place))
        if (salt := prompt.get("cache_salt")) is not None:
            if not isinstance(salt, str) or not salt:
                raise PromptError(
                    f"prompt {place} has the cache_salt {salt!r}; give a non-empty string, or leave it out"
                )
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
            f"prompt {place} is text, but this model has no tokenizer; put the tokenizer files beside the weights, "
            "or give prompt_token_ids (on the command line in --prompts-file; in Python tokenizer=... works, too)"
        )
    check_unicode(prompt, f"prompt {place}")
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    if not ids:
        raise PromptError(f"prompt {place} is empty: {prompt!r} has no tokens; give some text, or the BOS token")
    return Prompt(tuple(ids), prompt)


def chat_prompt(tokenizer: PreTrainedTokenizerBase | None, messages: Any, **template_options: Any) -> dict[str, Any]:
    """Render one conversation with the chat template, and return its text and token ids as a prompt mapping.

    Raises: ConfigError if the model has no chat template, or another error of `chat_text`.
    """
    text = chat_text(tokenizer, messages, **template_options)
    assert tokenizer is not None
    return {"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]}


def chat_text(tokenizer: PreTrainedTokenizerBase | None, messages: Any, **template_options: Any) -> str:
    """Render one conversation with the chat template.

    Args:
      messages: conversation, or text as the only message of a user.
      template_options: template variables and arguments of ``apply_chat_template``. They may also be given in the
        mapping ``chat_template_kwargs``, as in vLLM.

    Raises: ConfigError if the model has no template or the template is not valid Jinja; PromptError if the template
      rejects the messages (for example a system message), or rendering fails for any other reason.
    """
    if tokenizer is None or not tokenizer.chat_template:
        lacks = "tokenizer, and therefore no chat template" if tokenizer is None else "chat template"
        raise ConfigError(
            f"this model has no {lacks}; give plain prompts (foredraft generate), or put a tokenizer with a "
            "chat_template.jinja beside the weights"
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    inside = template_options.pop("chat_template_kwargs", None) or {}
    if not isinstance(inside, Mapping) or inside.keys() & template_options.keys():
        raise ConfigError(
            f"chat_template_kwargs is {inside!r}; give a mapping of options that are not also given directly"
        )
    options = {"add_generation_prompt": True, **template_options, **inside}
    messages = list(messages) if has_items(messages) else messages
    try:
        # tokenizers that override apply_chat_template do not use a Jinja template
        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        return rendered_chat(tokenizer, messages, options)
    except TemplateFailure as error:
        if error.is_unreadable:
            raise ConfigError(
                f"the chat template of the model cannot be read ({error}); correct chat_template.jinja beside the "
                "weights, or give plain prompts (on the command line --raw)"
            ) from None
        raise PromptError(f"the chat template of the model does not accept these messages: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, ForedraftError):
            raise
        message = f"the chat template of the model does not accept these messages: {error_with_type(error)}"
        raise PromptError(message) from error
    except RecursionError as error:
        raise PromptError("the messages or tools are nested too deeply; make them flatter") from error


def _ids(value: Any, place: int) -> tuple[int, ...]:
    ids = _any_ids(value, place)
    if not ids:
        raise PromptError(f"prompt {place} is empty: it has no token ids; give at least one, such as the BOS token")
    return ids


def _any_ids(value: Any, place: int) -> tuple[int, ...]:
    """Token ids of a list or another iterable, which may be empty."""
    if not has_items(value):
        raise PromptError(f"prompt {place} is {type(value).__name__}; give text or a list of token ids")
    items = list(value)
    try:
        return tuple(ints_of(items))
    except TypeError:
        wrong = next(token for token in items if not _is_index(token))
        raise PromptError(f"prompt {place} contains {wrong!r}; token ids are whole numbers") from None


def _output_ids(value: Any, place: int) -> tuple[tuple[int, ...], ...]:
    """Existing output of every sample of a prompt. A flat list of numbers is the output of a single sample."""
    if not has_items(value):
        raise PromptError(
            f"prompt {place} has the output_ids {value!r}; give the token ids of the output so far, or one such list "
            "for each of the n samples"
        )
    items = list(value)
    return tuple(_any_ids(ids, place) for ids in (items if items and has_items(items[0]) else [items]))


def _is_index(value: Any) -> bool:
    try:
        whole_number(value)
    except TypeError:
        return False
    return True


def conversations_of(messages: Any) -> list[Any]:
    """Return the conversations of a call as a list. The call may contain text, one list of messages, or several
    conversations. Iterators are converted to lists.

    Raises: PromptError for a value that contains no messages.
    """
    if isinstance(messages, str):
        return [messages]
    if not has_items(messages):
        raise PromptError(
            f'the messages are {type(messages).__name__}; give a list such as [{{"role": "user", "content": "..."}}], '
            "or a list of such lists"
        )
    items = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def read_params(
    params: SamplingParams | Mapping[str, Any] | Iterable[SamplingParams | Mapping[str, Any]] | None,
    num_prompts: int,
    tokenizer: PreTrainedTokenizerBase | None,
    defaults: Mapping[str, Any] | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters of every prompt, with ``bad_words`` and ``prediction`` as token ids.

    Args:
      params: parameters for all prompts, or one set for each.
      defaults: the model's parameters, used where the user sets none.

    Raises: ConfigError if the number of parameters differs from that of the prompts, or if text has to be tokenized and
      the model has no tokenizer.
    """
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [resolved(_read_one(params).filled(defaults or {}), tokenizer)] * num_prompts
    if not has_items(params):
        raise ConfigError(f"sampling_params is {params!r}; give SamplingParams, a mapping of its fields, or a list")
    listed = list(params)
    if len(listed) != num_prompts:
        raise ConfigError(
            f"{len(listed)} sampling parameters for {num_prompts} prompts; give one set for all, or one per prompt"
        )
    return [resolved(_read_one(item).filled(defaults or {}), tokenizer) for item in listed]


def _read_one(params: Any) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    if params is None:
        return SamplingParams()
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"sampling_params contains {type(params).__name__}; every entry must be SamplingParams or a mapping of its "
            "fields"
        )
    return SamplingParams.from_dict(params)


def seeded(params: SamplingParams, seed: int | None, number: int) -> SamplingParams:
    """Return the parameters with a seed, so that the request can be reproduced.

    Args:
      seed: seed of the `LLM`; None for none.
      number: number of the request.

    Randomness: the seed of the parameters if they have one. Else a seed derived from the seed of the LLM and the
      request number. If the LLM has none either, a random seed.
    """
    if params.seed is not None:
        return params
    if seed is None:
        return replace(params, seed=secrets.randbits(_SEED_BITS))
    return replace(params, seed=mix(seed, number) >> (64 - _SEED_BITS))


_WITHOUT_TEXT = {"stop": "use stop_token_ids", "bad_words": "use bad_words_ids", "prediction": "give token ids"}


def resolved(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> SamplingParams:
    """Return the parameters with ``bad_words`` and ``prediction`` as token ids. A second call changes nothing.

    Raises: ConfigError if text has to be tokenized and the model has no tokenizer.
    """
    for name, remedy in _WITHOUT_TEXT.items():
        given = getattr(params, name)
        if given and tokenizer is None and (name != "prediction" or isinstance(given, str)):
            raise ConfigError(
                f"{name} is text, but this model has no tokenizer; put its files beside the weights, or {remedy}"
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
    """Token sequences of a word at the start of a text and after a space, without duplicates."""
    check_unicode(word, f"bad word {word!r}")
    found = []
    for text in (word, " " + word.lstrip()):
        ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if ids and ids not in found:
            found.append(ids)
    return found
