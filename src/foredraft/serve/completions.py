"""``/v1/completions``: parsing of requests and format of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foredraft.config.other_systems import UnsupportedOption
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import REFUSED, SHARED, Fields, wrong_field
from foredraft.serve.form import ChoicesForm
from foredraft.serve.parsed_request import ParsedRequest, read_request, with_prompts
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.tokens import Offsets, Table, completion_logprobs, echoed_logprobs, prompt_tables, token_ids

KNOWN = SHARED | {"prompt", "echo", "logprobs"}
_CHAT_ONLY = UnsupportedOption(
    "it is a field of /v1/chat/completions; use that endpoint", (None, [], {}, "none", "auto")
)
COMPLETION_REFUSED = {
    **REFUSED,
    **dict.fromkeys(("tools", "tool_choice", "chat_template_kwargs"), _CHAT_ONLY),
}


def read_completion(
    body: dict[str, Any], served: Served, settings: ServerSettings
) -> tuple[ParsedRequest, CompletionForm]:
    """Parse the body of a request. Parsing tokenizes the prompts, which is slow, so it must not be called in the event
    loop.

    Returns: the request and the format of its response.
    Raises: ApiError, PromptError.
    """
    asks_for_all = body.get("best_of") == body.get("n")  # then all samples are returned, and nothing is selected
    given = Fields(
        {name: value for name, value in body.items() if name != "best_of" or not asks_for_all},
        KNOWN,
        COMPLETION_REFUSED,
    )
    logprobs = given.whole("logprobs", None, 0, settings.max_logprobs)
    if given.get("logprob_token_ids") is not None and logprobs is None:
        message = "logprob_token_ids is given, but logprobs is not; set logprobs to a number"
        raise ApiError(400, message, "logprob_token_ids")
    echo = given.flag("echo")
    of_prompt = given.whole("prompt_logprobs", None, 0, settings.max_logprobs)
    learned: dict[str, Any] = (
        {"prompt_logprobs": max(logprobs, of_prompt or 0)} if echo and logprobs is not None else {}
    )
    parsed = read_request(given, served, settings, logprobs=logprobs, **learned)
    is_cut = parsed.truncate_prompt_tokens is not None
    read = partial(_prompt, served=served, adds=given.flag("add_special_tokens", True), is_cut=is_cut)
    prompts = _prompts(given.get("prompt"), read, settings.max_prompts)
    parsed = with_prompts(parsed, prompts, served, settings)
    return parsed, CompletionForm(parsed, served, echo, of_prompt)


def _prompts(prompt: Any, read: Callable[[Any], dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Parse one prompt or a list of prompts, each given as text or token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        wrong_field("prompt", prompt, "text, a list of token ids, or a list of these")
    if len(prompt) > most:
        raise ApiError(400, f"the request has {len(prompt)} prompts; send at most {most}", "prompt")
    return [read(one) for one in prompt]


def _prompt(prompt: Any, served: Served, adds: bool, is_cut: bool) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "prompt_token_ids": served.encode(prompt, adds, is_cut=is_cut)}
    return {"prompt_token_ids": token_ids(prompt, served.num_embeddings, "prompt")}


class CompletionForm(ChoicesForm):
    """Response format of ``/v1/completions``.

    Args:
      echo: whether every completion begins with its prompt, and its log-probabilities begin with those of the prompt.
      of_prompt: number of top log-probabilities per prompt token in the field ``prompt_logprobs``; None to leave the
        field out.
    """

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, parsed: ParsedRequest, served: Served, echo: bool, of_prompt: int | None) -> None:
        super().__init__(parsed, served)
        self._echo, self._most_of_prompt = echo, of_prompt
        self._learns_prompt = parsed.params.prompt_logprobs is not None
        self._tokenizer = served.llm.tokenizer
        self._offsets: dict[int, Offsets] = {}  # by choice, for streams
        self._begun: set[int] = set()  # choices of a stream with sent output

    def first_choices(self) -> list[dict[str, Any]]:
        if not self._echo or self._learns_prompt:  # sent with its log-probabilities later
            return []
        texts = [self._prompt_text(prompt) for prompt in self._parsed.prompts for _ in range(self._parsed.params.n)]
        self._offsets = {index: self._new_offsets(len(text)) for index, text in enumerate(texts)}
        choices = [self._choice(index, text, None, None) for index, text in enumerate(texts)]
        return [self._begin(choice) for choice in choices]

    def _begin(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Add the prompt's token ids to the first choice of a row in a stream, if the request returns token ids."""
        if self._parsed.returns_ids and choice["index"] not in self._begun:
            self._begun.add(choice["index"])
            prompt = self._parsed.prompts[choice["index"] // self._parsed.params.n]
            choice["prompt_token_ids"] = list(prompt["prompt_token_ids"])
        return choice

    def _new_offsets(self, start: int) -> Offsets:
        return Offsets(self._tokenizer, start, skip_special_tokens=self._parsed.params.skip_special_tokens)

    def _prompt_text(self, prompt: dict[str, Any]) -> str:
        if "prompt" in prompt or self._tokenizer is None:
            return str(prompt.get("prompt", ""))
        return str(self._tokenizer.decode(prompt["prompt_token_ids"]))

    def choices(self, delta: StreamOutput) -> list[dict[str, Any]]:
        index = delta.prompt_index * self._parsed.params.n + delta.index
        length = len(delta.token_ids)
        choices = [] if delta.prompt_logprobs is None else [self._read_prompt(index, delta)]
        if not length:
            choices.append(self._choice(index, delta.text, delta.finish_reason, delta.stop_reason))
        else:
            choices += [self._part(index, delta, part, is_last=part.stop == length) for part in self._parts(delta)]
        return [self._begin(choice) for choice in choices]

    def _read_prompt(self, index: int, delta: StreamOutput) -> dict[str, Any]:
        """Choice with the log-probabilities of the prompt, sent before the first token of a row."""
        prompt, tables = self._parsed.prompts[delta.prompt_index], delta.prompt_logprobs
        choice = self._choice(index, self._prompt_text(prompt) if self._echo else "", None, None)
        self._offsets[index] = self._new_offsets(len(choice["text"]))
        if self._echo and self._parsed.params.logprobs is not None:
            choice["logprobs"] = self._of_prompt(prompt, tables)
        return choice | self._beside(tables)

    def _beside(self, tables: Sequence[Table | None] | None) -> dict[str, Any]:
        """Field ``prompt_logprobs`` in vLLM's format, if the request contains it."""
        most = self._most_of_prompt
        return {} if most is None else {"prompt_logprobs": prompt_tables(tables, most)}

    def _part(self, index: int, delta: StreamOutput, part: slice, is_last: bool) -> dict[str, Any]:
        reasons = (delta.finish_reason, delta.stop_reason) if is_last else (None, None)
        choice = self._choice(index, "".join(delta.texts[part]), *reasons)
        if delta.logprobs is not None:
            if index not in self._offsets:
                self._offsets[index] = self._new_offsets(0)
            choice["logprobs"] = self._logprobs(delta.token_ids[part], delta.logprobs[part], self._offsets[index])
        return self._tell(choice, delta, part)

    def _logprobs(self, ids: Any, tables: Any, offsets: Offsets) -> dict[str, Any]:
        params, begins = self._parsed.params, offsets.read(ids)
        is_named = bool(params.logprob_token_ids)
        return completion_logprobs(self._names, ids, tables, begins, params.logprobs or 0, is_named)

    def _of_prompt(self, prompt: dict[str, Any], tables: Sequence[Table | None] | None) -> dict[str, Any]:
        """Log-probabilities of an echoed prompt."""
        assert tables is not None
        ids = prompt["prompt_token_ids"]
        offsets = Offsets.of_prompt(self._tokenizer, ids, self._prompt_text(prompt))
        return echoed_logprobs(self._names, ids, tables, offsets, self._parsed.params.logprobs or 0)

    @staticmethod
    def _choice(index: int, text: str, finish_reason: str | None, stop_reason: Any) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for prompt, output in zip(self._parsed.prompts, outputs, strict=True):
            before = self._prompt_text(prompt) if self._echo else ""
            for text in output.outputs:
                choice = self._choice(len(choices), before + text.text, text.finish_reason, text.stop_reason)
                if text.logprobs is not None:
                    logprobs = self._logprobs(text.token_ids, text.logprobs, self._new_offsets(len(before)))
                    if self._echo:
                        read = self._of_prompt(prompt, output.prompt_logprobs)
                        logprobs = {name: [*read[name], *logprobs[name]] for name in logprobs}
                    choice["logprobs"] = logprobs
                choice |= self._beside(output.prompt_logprobs)
                if self._parsed.returns_ids:
                    choice["token_ids"] = list(text.token_ids)
                    choice["prompt_token_ids"] = list(output.prompt_token_ids)
                choices.append({**choice, "seed": text.seed})
        return choices
