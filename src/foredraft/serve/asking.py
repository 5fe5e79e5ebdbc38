"""Requests for generation, read from the fields that completions and chat have in common."""

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
"""Characters of a salt, as in vLLM."""
FIT_FOR_LOGS = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True)
class ParsedRequest:
    """Request for generation, read from the body of one of the endpoints.

    Args:
      model: served name that the request gives, or the default one.
      llm: model and way of drafting.
      prompts: token ids, with their text where that was given.
      params: parameters of every prompt.
      streams: whether the answer is a stream.
      includes_usage, continues_usage: whether a stream has usage at its end, and with every chunk.
      by_token: one chunk for each token, or one for each step.
      interval: least number of tokens of a chunk that holds steps.
      returns_ids: whether answers contain token ids.
      names_ids: whether log-probabilities name tokens by their ids.
      returns_drafts: whether chunks show the drafter of a token and rejected tokens.
      detail: "none", "summary" or "detailed" counts of speculation.
      verifies: whether the output is compared with that of plain decoding.
      timeout: time limit, in seconds.
      truncate_prompt_tokens: tokens that longer prompts are cut to; -1 for as many as leave room for ``max_tokens``;
        None to refuse prompts that are too long.
      truncation_side: "left" keeps the last tokens, "right" the first ones.
      cache_salt: prefixes are shared only with requests of the same salt; None for those without.
      request_id: id from the client, or a drawn one. Ids of answers end with it.
      unknown: names of fields that were ignored.
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
        """A header that names what was ignored."""
        return warning_of(self.unknown)


def read_asking(
    given: Fields, served: Served, settings: ServerSettings, forced: dict[str, Any] | None = None, **params: Any
) -> ParsedRequest:
    """All but the prompts, which take a tokenizer.

    Args:
      forced: what the output must match whatever the body says of its form; None for what the body says.
      params: fields of `SamplingParams` that go before what the body says of them.

    Raises: ApiError, naming the field.
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
        message = "tool_choice forces a call, and structured_outputs another output; leave one of them out"
        raise ApiError(400, message, "structured_outputs")
    sent["structured_outputs"] = forced or form
    if sent.get("prompt_logprobs") is not None:
        given.whole("prompt_logprobs", None, 0, settings.max_logprobs)
    if len(given.numbers("logprob_token_ids")) > settings.max_logprobs:
        raise ApiError(400, f"logprob_token_ids may have {settings.max_logprobs} entries", "logprob_token_ids")
    if sent.get("max_tokens", 0) is None and "max_tokens" in llm.sampling_defaults:  # a chat that names no number
        del sent["max_tokens"]
    read = read_params(sent, llm.tokenizer, llm.sampling_defaults)
    llm.prepare(read)
    broken = unheld_keywords(StructuredOutputs.of(sent["structured_outputs"])) if sent["structured_outputs"] else ()
    interval = given.whole("stream_interval", 1, 1, 2**31 - 1)
    if interval > 1 and given.flag("return_drafts"):
        raise ApiError(
            400, "stream_interval joins steps, and return_drafts tells of each; leave one out", "stream_interval"
        )
    options = stream_options(given)
    if (most := given.whole("truncate_prompt_tokens", None, -1, 2**31 - 1)) == 0:
        wrong_field("truncate_prompt_tokens", most, "a number of tokens, or -1 for as many as there is room for")
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
    """Required form of the output: ``structured_outputs`` of vLLM, or ``response_format`` of the OpenAI API.

    Raises: ApiError for both, or a format that is none.
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
            400, "response_format and structured_outputs are given; leave one of them out", "response_format"
        )
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {"json_object": True} if form.get("schema") is None else {"json": form["schema"]}
    schema = form.get("json_schema") if isinstance(form, dict) and form.get("type") in (None, "json_schema") else None
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    wrong_field("response_format", form, "{type: 'text', 'json_object', or 'json_schema' with json_schema.schema}")


def read_prediction(given: Any, served: Served) -> str | list[int] | None:
    """The output that a request predicts: ``{"type": "content", "content": ...}``, text, or token ids.

    Raises: ApiError for anything else, and for text that no output has room for.
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
    """Cache salt of a request: only prompts of the same salt share prefixes.

    Raises: ApiError for an empty one, which would tell nothing.
    """
    salt = given.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MOST_SALT):
        wrong_field("cache_salt", salt, f"a text of 1 to {MOST_SALT} characters")
    return salt


def read_request_id(given: Fields) -> str:
    """The id that a client gives its request, or a new one.

    Raises: ApiError for one that is long, or cannot stand in a log.
    """
    wanted = given.text("request_id") or secrets.token_hex(12)
    if not FIT_FOR_LOGS.fullmatch(wanted):
        wrong_field("request_id", wanted, "at most 128 letters, digits and signs of ASCII, without spaces")
    return wanted


def read_params(sent: dict[str, Any], tokenizer: Any, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters whose texts are token ids already, so that the thread of the engine has none to read.

    Args:
      defaults: parameters of the model, for those that the request does not set.

    Raises: ApiError, naming the field.
    """
    try:
        return resolved(SamplingParams.from_dict(sent).filled(defaults), tokenizer)
    except (ConfigError, OverflowError, TypeError) as error:
        message = str(error).replace("SamplingParams.", "")
        field = re.match(r"\w+", message)
        raise ApiError(400, message, field[0] if field and field[0] in sent else None) from None


def with_prompts(
    asking: ParsedRequest, prompts: Sequence[dict[str, Any]], served: Served, settings: ServerSettings
) -> ParsedRequest:
    """The request with its prompts.

    Raises: ApiError where there are none, more than the server allows, or one without room for a new token.
    """
    if not 0 < len(prompts) <= settings.max_prompts:
        raise ApiError(400, f"the request has {len(prompts)} prompts; give 1 to {settings.max_prompts}", "prompt")
    limit, num_new = served.max_model_len, 0 if asking.params.max_tokens == 0 else 1
    if (most := asking.truncate_prompt_tokens) is not None:
        longest = num_new if asking.params.max_tokens is None else asking.params.max_tokens
        room = None if limit is None else max(1, limit - longest)
        prompts = [_truncated(prompt, room if most == -1 else most, asking.truncation_side) for prompt in prompts]
    for place, prompt in enumerate(prompts):
        length = len(prompt["prompt_token_ids"])
        if limit is not None and length + num_new > limit:
            message = f"This model's maximum context length is {limit} tokens, and prompt {place} has {length}: no room"
            raise ApiError(400, f"{message} for a new token; shorten the prompt", "prompt", "context_length_exceeded")
    if asking.cache_salt is not None:
        prompts = [{**prompt, "cache_salt": asking.cache_salt} for prompt in prompts]
    asking = replace(asking, prompts=prompts)
    if asking.num_texts > settings.max_prompts:
        message = f"the request asks for {asking.num_texts} texts; prompts times n may be {settings.max_prompts}"
        raise ApiError(400, message, "n")
    return asking


def _truncated(prompt: dict[str, Any], most: int | None, side: str) -> dict[str, Any]:
    """A prompt cut to at most so many tokens. A cut prompt has no text but that of its tokens."""
    ids = prompt["prompt_token_ids"]
    if most is None or len(ids) <= most:
        return prompt
    return {"prompt_token_ids": ids[-most:] if side == "left" else ids[:most]}
