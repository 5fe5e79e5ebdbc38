"""Fields of a request body: reading with type checks, and refusal of fields that are not supported."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from foredraft.config.keywords import nearest
from foredraft.config.other_systems import UnsupportedOption
from foredraft.config.sampling import SamplingParams
from foredraft.serve.errors import ApiError

T = TypeVar("T")

MOST_WHOLE = 2**53
"""Limit below which every whole number has an exact float."""
MAX_NAMED = 10
"""Maximum number of unknown fields listed in a message."""
MAX_NAME = 40
"""Maximum number of characters of each listed field."""

_READ_HERE = {"detokenize", "logits_processors", "logprobs", "n", "num_speculative_tokens", "prediction"}
SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - _READ_HERE - {"structured_outputs"}
"""Fields that are passed to `SamplingParams` unchanged unless they are null."""

MOST_ENTRIES = {"stop": 128, "bad_words": 1024, "bad_words_ids": 1024}
"""Maximum length of the lists that are searched at every token. One request with 100,000 stop strings slowed all
others."""

SHARED = SAMPLING | {
    "n",
    "prediction",
    "response_format",
    "structured_outputs",
    "model",
    "stream",
    "stream_options",
    "stream_granularity",
    "stream_interval",
    "cache_salt",
    "add_special_tokens",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "request_id",
    "truncate_prompt_tokens",
    "truncation_side",
    "return_drafts",
    "speculative",
    "spec_decode_metrics",
    "verify",
    "timeout",
}
"""Fields that completions and chat share."""

IGNORED = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "priority",
})  # fmt: skip
"""Fields that do not affect the response."""

_STRUCTURED = "use structured_outputs, with the same value under json, regex, choice or grammar"
_JSON = "use response_format, {type: 'json_object'} or {type: 'json_schema', json_schema: {schema: ...}}"
_GRAMMAR = "use structured_outputs.grammar, with a Lark or EBNF grammar"
_NO_MEDIA = "prompts and responses are text; leave it out"
_NO_ADAPTER = "the server has no adapters; merge the adapter into the weights and serve that model"
_NO_GUIDANCE = "classifier-free guidance is not implemented; leave it out"
_AT_END = "prompts are continued only at their end; leave it out"
_NESTED = "set its fields (temperature, max_tokens and so on) at the top level of the request"
REFUSED = {
    "best_of": UnsupportedOption("all generated samples are returned; use n and choose among them", (None, 1)),
    "suffix": UnsupportedOption(_AT_END, (None, "")),
    "use_beam_search": UnsupportedOption("beam search is not implemented; use n for several samples", (None, False)),
    "functions": UnsupportedOption("use tools", (None, [])),
    "function_call": UnsupportedOption("use tool_choice", (None, "none", "auto")),
    "audio": UnsupportedOption(_NO_MEDIA),
    "web_search_options": UnsupportedOption("the server cannot search the web; leave it out"),
    "chat_template": UnsupportedOption("a request cannot change the template; start the server with --chat-template"),
    "documents": UnsupportedOption("the chat template does not use documents; write them into a message", (None, [])),
    # Names of output constraints in other servers. Ignoring them would return unconstrained text, a wrong response.
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), UnsupportedOption(_STRUCTURED)),
    **dict.fromkeys(("guided_decoding", "structural_tag", "output_format"), UnsupportedOption(_STRUCTURED)),
    **dict.fromkeys(("json_schema", "format", "response_schema"), UnsupportedOption(_JSON, (None, ""))),
    "guided_json_object": UnsupportedOption(_JSON, (None, False)),
    "regex": UnsupportedOption("use structured_outputs.regex", (None, "")),
    **dict.fromkeys(("grammar", "ebnf"), UnsupportedOption(_GRAMMAR, (None, ""))),
    # Names of stopping and sampling options in other servers.
    "stop_sequences": UnsupportedOption("use stop", (None, [])),
    "stop_regex": UnsupportedOption(
        "generation stops only at strings and tokens; use stop or stop_token_ids", (None, [], "")
    ),
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), UnsupportedOption("use max_tokens", (None, -1))),
    "min_new_tokens": UnsupportedOption("use min_tokens", (None, 0)),
    "num_return_sequences": UnsupportedOption("use n", (None, 1)),
    "repeat_penalty": UnsupportedOption("use repetition_penalty", (None, 1)),
    "logits_processors": UnsupportedOption(
        "requests cannot contain code; use logit_bias, bad_words or allowed_token_ids", (None, [])
    ),
    **dict.fromkeys(("options", "parameters", "sampling_params"), UnsupportedOption(_NESTED, (None, {}))),
    # Names of inputs in other servers.
    "system": UnsupportedOption("write it into the messages or the prompt", (None, "", [])),
    **dict.fromkeys(("input_prefix", "input_suffix"), UnsupportedOption(_AT_END, (None, ""))),
    **dict.fromkeys(("images", "image_data", "audio_data", "video_data"), UnsupportedOption(_NO_MEDIA, (None, []))),
    "multi_modal_data": UnsupportedOption(_NO_MEDIA, (None, {})),
    **dict.fromkeys(
        ("lora", "lora_path", "lora_request", "adapter_id"), UnsupportedOption(_NO_ADAPTER, (None, [], ""))
    ),
    **dict.fromkeys(("guidance_scale", "cfg_scale", "negative_prompt"), UnsupportedOption(_NO_GUIDANCE, (None, 1, ""))),
}
"""Fields of the OpenAI API, vLLM, SGLang, llama.cpp, TGI and Ollama that would change the response, but have another
name here or no counterpart; each with the reason and the remedy."""

WITHOUT_EFFECT = {
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}
"""Fields that frameworks send to every model, with the values that request the default behaviour. Other values are
treated as unknown fields: ignored and listed in the warning header."""

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, with the key of their text."""


class Fields:
    """Body of a request, with type-checked access to its fields.

    Args:
      body: JSON object of the request.
      known: fields that the caller reads.
      refused: fields that are refused unless their value requests the default behaviour.

    Attributes:
      unknown: names of fields that are unknown or without effect; fields that are null do not count.

    Raises: ApiError for a refused field.
    """

    def __init__(
        self, body: Mapping[str, Any], known: Collection[str], refused: Mapping[str, UnsupportedOption]
    ) -> None:
        heard = {*known, *IGNORED, *refused}
        self._known = known
        self.unknown = [
            name
            for name, value in body.items()
            if name not in heard and value is not None and value not in WITHOUT_EFFECT.get(name, ())
        ]
        self._body = {name: _whole(value) for name, value in body.items()}
        for name, foreign in refused.items():
            if name in body and name not in known and not foreign.is_harmless(body[name]):
                raise ApiError(400, f"{name} is not supported: {foreign.reason}", name, "unsupported_field")

    def refuse_unknown(self) -> None:
        """Refuse unknown fields.

        Raises: ApiError.
        """
        if self.unknown:
            near = nearest(self.unknown[0], self._known)
            hint = f"; did you mean {near[0]}?" if near else "; leave them out"
            raise ApiError(400, f"unknown fields: {named(self.unknown)}{hint}", self.unknown[0], "unknown_field")

    def get(self, name: str) -> Any:
        """Value of a field, unchecked; None if it is absent."""
        return self._body.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._read(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, default: str = "") -> str:
        return self._read(name, default, lambda value: isinstance(value, str), "a string")

    def choice(self, name: str, default: str, known: Collection[str]) -> str:
        return self._read(name, default, lambda value: isinstance(value, str) and value in known, " or ".join(known))

    def whole(self, name: str, default: T, low: int, high: int) -> int | T:
        fits: Callable[[Any], bool] = lambda value: type(value) is int and low <= value <= high  # noqa: E731
        return self._read(name, default, fits, f"a whole number between {low} and {high}")

    def seconds(self, name: str, default: float) -> float:
        """Number of seconds in a field, at most the default."""
        fits: Callable[[Any], bool] = lambda value: type(value) in (int, float) and value > 0  # noqa: E731
        return float(min(default, self._read(name, default, fits, "a number of seconds above 0")))

    def check_entries(self) -> None:
        """Check the lengths of the lists in `MOST_ENTRIES`.

        Raises: ApiError for a list that is too long.
        """
        for name, most in MOST_ENTRIES.items():
            if isinstance(value := self._body.get(name), list) and len(value) > most:
                raise ApiError(400, f"{name} has {len(value)} entries; the limit is {most}, so send fewer", name)

    def objects(self, name: str) -> list[dict[str, Any]]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(one, dict) for one in value)

        return list(self._read(name, [], fits, "a list of objects"))

    def numbers(self, name: str) -> list[int]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(type(one) is int for one in value)

        return list(self._read(name, [], fits, "a list of whole numbers"))

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._read(name, {}, lambda value: isinstance(value, dict), "an object"))

    def _read(self, name: str, default: T, fits: Callable[[Any], bool], what: str) -> Any | T:
        value = self._body.get(name)
        if value is None:
            return default
        if not fits(value):
            wrong_field(name, value, what)
        return value


def text_of(content: Any, between: str = "") -> str | None:
    """Return the text of a message content, which is a string or a list of text parts; None for any other content.

    Args:
      between: separator between parts.
    """
    parts = content if isinstance(content, list) else [content]
    texts = [_text_of(part) for part in parts]
    return between.join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _text_of(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else part


def _whole(value: Any) -> Any:
    """Convert a whole-number float such as 5.0 to int. JSON does not distinguish them, and clients in some languages
    write floats."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MOST_WHOLE else value


def wrong_field(name: str, value: Any, what: str) -> NoReturn:
    """Raise an ApiError for an invalid value of a field."""
    raise ApiError(400, f"{name} is {shown(value)}; it must be {what}", name)


def shown(value: Any) -> str:
    """Short ASCII form of a value for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 2 * MAX_NAME else text[: 2 * MAX_NAME] + "..."


def named(unknown: Collection[str]) -> str:
    """Short ASCII list of unknown fields for a header or an error message."""
    names = [json.dumps(name)[1 : MAX_NAME + 1].strip('" ') or '""' for name in sorted(unknown)[:MAX_NAMED]]
    return ", ".join(names) + (f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else "")


def warning_of(unknown: Collection[str]) -> dict[str, str]:
    """Response header that lists ignored fields."""
    return {"x-foredraft-warning": f"fields were ignored: {named(unknown)}"} if unknown else {}


def stream_options(given: Fields) -> Fields:
    """Read the field ``stream_options``.

    Raises: ApiError for unknown options, and for options of a response that is not streamed.
    """
    options = given.mapping("stream_options")
    if options and not given.flag("stream"):
        raise ApiError(
            400, "stream_options is set, but stream is not true; set stream, or leave it out", "stream_options"
        )
    read = Fields(options, {"include_usage", "continuous_usage_stats", "include_obfuscation"}, {})
    if read.unknown:
        raise ApiError(400, f"stream_options has no field {named(read.unknown)}; leave it out", "stream_options")
    return read
