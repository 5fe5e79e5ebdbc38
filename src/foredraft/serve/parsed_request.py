"""Parsing of generation requests: the fields that completions and chat share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.config.sampling import SamplingParams
from foredraft.config.structured import StructuredOutputs
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.prompts.prompts import resolved
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import SAMPLING, Fields, stream_options, text_of, warning_of, wrong_field
from foredraft.serve.served import Served
from foredraft.serve.settings import DETAILS, GRANULARITIES, ServerSettings
from foredraft.serve.tokens import token_ids
from foredraft.structured.schemas import unheld_keywords

MOST_SALT = 1024
"""Maximum length of a cache salt in characters, as in vLLM."""
FIT_FOR_LOGS = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True)
class ParsedRequest:
    """Generation request, parsed from the body of any of the endpoints.

    Args:
      model: served name in the request, or the default name.
      llm: model and drafting method.
      prompts: token ids of each prompt, with its text if the client sent text.
      params: sampling parameters of every prompt.
      streams: whether the response is streamed.
      includes_usage, continues_usage: whether a stream contains usage at its end, and in every chunk.
      by_token: whether a chunk contains one token; otherwise it contains the tokens of a step.
      interval: minimum number of tokens in a chunk when chunks contain whole steps.
      returns_ids: whether the response contains token ids.
      names_ids: whether log-probabilities name tokens by their ids.
      returns_drafts: whether chunks contain the drafter of each token and the rejected tokens.
      detail: detail of the speculation counts: "none", "summary" or "detailed".
      verifies: whether the output is compared with plain decoding.
      timeout: time limit in seconds.
      truncate_prompt_tokens: number of tokens that longer prompts are cut to; -1 to leave room for ``max_tokens``; None
        to refuse prompts that are too long.
      truncation_side: "left" to keep the last tokens, "right" to keep the first.
      cache_salt: salt of the prefix cache; only requests with the same salt share prefixes. None for no salt.
      request_id: id from the client, or a random one. The id of the response ends with it.
      unknown: names of ignored fields.
    """

    model: str
    llm: LLM
    prompts: Sequence[dict[str, Any]]
    params: SamplingParams
    streams: bool
    includes_usage: bool
    continues_usage: bool
    by_token: bool
    interval: int
    returns_ids: bool
    names_ids: bool
    returns_drafts: bool
    detail: str
    verifies: bool
    timeout: float
    truncate_prompt_tokens: int | None
    truncation_side: str
    cache_salt: str | None
    request_id: str
    unknown: Sequence[str]

    @property
    def num_texts(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts)

    @property
    def warning(self) -> dict[str, str]:
        """Response header that lists ignored fields."""
        return warning_of(self.unknown)


def read_request(
    given: Fields, served: Served, settings: ServerSettings, forced: dict[str, Any] | None = None, **params: Any
) -> ParsedRequest:
    """Parse all fields except the prompts, whose parsing needs the tokenizer.

    Args:
      forced: output constraint that replaces the one in the body; None to use that of the body.
      params: values of `SamplingParams` fields that replace those of the body.

    Raises: ApiError that names the field.
    """
    if settings.strict_fields:
        given.refuse_unknown()
    given.check_entries()
    model = given.text("model")
    llm, length = served.choose(model, given.get("speculative"))
    sent = {name: given.get(name) for name in SAMPLING if given.get(name) is not None}
    sent |= {"n": given.whole("n", 1, 1, settings.max_n), "num_speculative_tokens": length, **params}
    sent["prediction"] = read_prediction(given.get("prediction"), served)
    form = read_form(given)
    if forced and given.get("structured_outputs") is not None:
        message = "tool_choice forces a tool call, which contradicts structured_outputs; leave one of them out"
        raise ApiError(400, message, "structured_outputs")
    sent["structured_outputs"] = forced or form
    if sent.get("prompt_logprobs") is not None:
        given.whole("prompt_logprobs", None, 0, settings.max_logprobs)
    if len(given.numbers("logprob_token_ids")) > settings.max_logprobs:
        raise ApiError(
            400,
            f"logprob_token_ids may have at most {settings.max_logprobs} entries; send fewer",
            "logprob_token_ids",
        )
    if sent.get("max_tokens", 0) is None and "max_tokens" in llm.sampling_defaults:  # a chat request without a limit
        del sent["max_tokens"]
    read = read_params(sent, llm.tokenizer, llm.sampling_defaults)
    llm.prepare(read)
    broken = unheld_keywords(StructuredOutputs.of(sent["structured_outputs"])) if sent["structured_outputs"] else ()
    interval = given.whole("stream_interval", 1, 1, 2**31 - 1)
    if interval > 1 and given.flag("return_drafts"):
        raise ApiError(
            400,
            "stream_interval merges steps, but return_drafts describes each step; leave one of them out",
            "stream_interval",
        )
    options = stream_options(given)
    if (most := given.whole("truncate_prompt_tokens", None, -1, 2**31 - 1)) == 0:
        wrong_field("truncate_prompt_tokens", most, "a positive number of tokens, or -1 for as many as fit")
    return ParsedRequest(
        model=model or served.name,
        llm=llm,
        prompts=(),
        params=read,
        streams=given.flag("stream"),
        includes_usage=options.flag("include_usage"),
        continues_usage=options.flag("continuous_usage_stats"),
        by_token=given.choice("stream_granularity", settings.stream_granularity, GRANULARITIES) == "token"
        and interval == 1,
        interval=interval,
        returns_ids=given.flag("return_token_ids"),
        names_ids=given.flag("return_tokens_as_token_ids"),
        returns_drafts=given.flag("return_drafts"),
        detail=given.choice("spec_decode_metrics", settings.spec_decode_metrics, DETAILS),
        verifies=given.flag("verify"),
        timeout=given.seconds("timeout", settings.request_timeout),
        truncate_prompt_tokens=most,
        truncation_side=given.choice("truncation_side", "left", ("left", "right")),
        cache_salt=read_salt(given),
        request_id=read_request_id(given),
        unknown=(*given.unknown, *broken),
    )


def read_form(given: Fields) -> dict[str, Any] | None:
    """Output constraint of a request: vLLM's ``structured_outputs``, or ``response_format`` of the OpenAI API.

    Raises: ApiError if both are given, or the constraint is invalid.
    """
    wanted, form = given.get("structured_outputs"), given.get("response_format")
    if isinstance(form, dict):
        form = {name: value for name, value in form.items() if value is not None}
    if wanted is not None and not isinstance(wanted, dict):
        wrong_field("structured_outputs", wanted, "an object with json, regex, choice, grammar or json_object")
    if form is None or form == {"type": "text"}:
        return wanted
    if wanted is not None:
        raise ApiError(
            400, "response_format and structured_outputs are both set; leave one of them out", "response_format"
        )
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {"json_object": True} if form.get("schema") is None else {"json": form["schema"]}
    schema = form.get("json_schema") if isinstance(form, dict) and form.get("type") in (None, "json_schema") else None
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    wrong_field("response_format", form, "{type: 'text', 'json_object', or 'json_schema' with json_schema.schema}")


def read_prediction(given: Any, served: Served) -> str | list[int] | None:
    """Output that the request predicts: ``{"type": "content", "content": ...}``, text, or token ids.

    Raises: ApiError for any other value, and for text that is longer than the longest possible output.
    """
    if given is None:
        return None
    if isinstance(given, list):
        return token_ids(given, served.vocab_size, "prediction")
    is_content = isinstance(given, dict) and given.get("type") == "content"
    text = text_of(given.get("content")) if is_content else given
    if isinstance(text, str):
        served.check_length(text, "prediction")
        return text
    wrong_field("prediction", given, "{type: 'content', content: text or parts of type text}")


def read_salt(given: Fields) -> str | None:
    """Cache salt of a request. Only prompts with the same salt share cached prefixes.

    Raises: ApiError for an empty salt or one that is too long.
    """
    salt = given.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MOST_SALT):
        wrong_field("cache_salt", salt, f"a string of 1 to {MOST_SALT} characters")
    return salt


def read_request_id(given: Fields) -> str:
    """Return the request id that the client sent, or a new one.

    Raises: ApiError for an id that is too long or contains characters that are unsafe in logs.
    """
    wanted = given.text("request_id") or secrets.token_hex(12)
    if not FIT_FOR_LOGS.fullmatch(wanted):
        wrong_field("request_id", wanted, "at most 128 printable ASCII characters without spaces")
    return wanted


def read_params(sent: dict[str, Any], tokenizer: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters in which all text is replaced by token ids, so that the engine thread does not
    tokenize.

    Args:
      sent: parameters from the request.
      defaults: the model's parameters, used where the request sets none.

    Raises: ApiError that names the field.
    """
    try:
        return resolved(SamplingParams.from_dict(sent).filled(defaults), tokenizer)
    except (ConfigError, OverflowError, TypeError) as error:
        message = str(error)
        field = re.match(r"\w+", message)
        raise ApiError(400, message, field[0] if field and field[0] in sent else None) from None


def with_prompts(
    parsed: ParsedRequest, prompts: Sequence[dict[str, Any]], served: Served, settings: ServerSettings
) -> ParsedRequest:
    """Return the request with its prompts.

    Raises: ApiError for no prompts, too many prompts, or a prompt that leaves no room for a new token.
    """
    if not 0 < len(prompts) <= settings.max_prompts:
        raise ApiError(400, f"the request has {len(prompts)} prompts; send 1 to {settings.max_prompts}", "prompt")
    limit, num_new = served.max_model_len, 0 if parsed.params.max_tokens == 0 else 1
    if (most := parsed.truncate_prompt_tokens) is not None:
        longest = num_new if parsed.params.max_tokens is None else parsed.params.max_tokens
        room = None if limit is None else max(1, limit - longest)
        prompts = [_truncated(prompt, room if most == -1 else most, parsed.truncation_side) for prompt in prompts]
    for place, prompt in enumerate(prompts):
        length = len(prompt["prompt_token_ids"])
        if limit is not None and length + num_new > limit:
            message = f"This model's maximum context length is {limit} tokens, and prompt {place} has {length} tokens,"
            message += " which leaves no room for a new token; shorten the prompt"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
    if parsed.cache_salt is not None:
        prompts = [{**prompt, "cache_salt": parsed.cache_salt} for prompt in prompts]
    parsed = replace(parsed, prompts=prompts)
    if parsed.num_texts > settings.max_prompts:
        message = (
            f"the request needs {parsed.num_texts} completions (prompts times n), and the limit of this server is "
        )
        raise ApiError(400, f"{message}{settings.max_prompts}; send fewer prompts or a smaller n", "n")
    return parsed


def _truncated(prompt: dict[str, Any], most: int | None, side: str) -> dict[str, Any]:
    """Cut a prompt to a maximum number of tokens. The result of a cut contains only token ids, because the text no
    longer matches."""
    ids = prompt["prompt_token_ids"]
    if most is None or len(ids) <= most:
        return prompt
    return {"prompt_token_ids": ids[-most:] if side == "left" else ids[:most]}
