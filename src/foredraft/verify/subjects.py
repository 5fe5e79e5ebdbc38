"""Decoders that can be verified: foredraft, transformers' own generation, any function that generates, or a server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

from foredraft.config.acceptance import RULES, TYPICAL, TypicalLimits
from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError, error_with_type
from foredraft.llm import LLM
from foredraft.sampling.noise import mix

ALL = frozenset(field.name for field in fields(SamplingParams))
TRANSFORMERS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "n", "ignore_eos"}
)
"""Fields that `TransformersSubject` supports."""


@dataclass(frozen=True)
class Sample:
    """One generated output.

    Args:
      token_ids: tokens without the prompt; None if only the text is known.
      text: the text; None if only the tokens are known.
      logprobs: log-probabilities of every position, by token id; None if they were not returned.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True)
class Answer:
    """The samples of one prompt.

    Args:
      num_drafted, num_accepted: numbers of verified and of accepted draft tokens; 0 if the subject does not count
        them.
    """

    samples: tuple[Sample, ...]
    num_drafted: int = 0
    num_accepted: int = 0


class Subject(ABC):
    """A decoder to verify.

    Args:
      name: name in reports.
      takes: fields of `SamplingParams` that the decoder supports. Settings that need other fields are left out.
      is_keyed: True if sampled outputs must equal those of plain decoding with the same seed. If False, only the
        distribution of sampled outputs is tested.
      counts_drafts: True if its answers contain the numbers of draft tokens.
      prefill_chunk_size: chunk size of its prefill, if the decoder is foredraft's and reports it. Chunks of another
        size are rounded differently, so plain decoding uses the same size.
    """

    name: str
    takes: frozenset[str] = ALL
    is_keyed = False
    counts_drafts = False
    prefill_chunk_size: int | None = None

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Continue prompts of token ids, each with its own parameters. Sampled requests have a seed."""


class LLMSubject(Subject):
    """An `LLM` with its own drafter.

    Args:
      name: name in reports; by default the method and the model.
    """

    counts_drafts = True

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        self.llm = llm
        self.name = name or f"{llm.speculative_config.title} over {llm.model_info.name}"
        self.is_keyed = llm.speculative_config.rule.keeps_tokens

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Generate for all prompts at once, in batches as large as the engine's."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = []
        explicit = [one.explicit() for one in params]  # the defaults of the model must not change a setting
        for result in self.llm.generate(asked, explicit, use_tqdm=False):
            counts = result.metrics.speculative_decoding
            samples = tuple(
                Sample(
                    tuple(output.token_ids),
                    output.text,
                    None
                    if output.logprobs is None
                    else tuple({token: each.logprob for token, each in place.items()} for place in output.logprobs),
                )
                for output in result.outputs
            )
            answers.append(Answer(samples, counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]))
        return answers


class BrokenSubject(Subject):
    """The positive control: the drafter of an `LLM` under a rule that accepts every draft token."""

    name = "control"
    counts_drafts = True

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Generate for all prompts at once."""
        broken = {"acceptance": TYPICAL.name, "typical": TypicalLimits(threshold=0.0, alpha=0.0)}
        with self._llm.engine(self._llm.drafting.new_drafter(), **broken) as engine:
            pairs = zip(prompts, params, strict=True)
            groups = [engine.add_request(list(prompt), each) for prompt, each in pairs]
            while not all(row.is_finished for rows in groups for row in rows):
                engine.step()
            return [
                Answer(
                    tuple(Sample(tuple(row.output_ids)) for row in rows),
                    sum(row.stats.num_draft_tokens for row in rows),
                    sum(row.stats.num_accepted_draft_tokens for row in rows),
                )
                for rows in groups
            ]


class FunctionSubject(Subject):
    """A function ``generate(prompt_ids, params)`` of another decoder.

    Args:
      function: function of a list of token ids and `SamplingParams` that returns the tokens that follow. For ``n``
        samples it returns a list of such lists. Without "n" in ``takes`` it is called once per sample, each time with
        another seed. The function may return `Sample` objects, which also contain text and log-probabilities.
      takes, is_keyed: see `Subject`. A function is not keyed by default: only a decoder that samples with foredraft's
        keyed noise can return the tokens of plain decoding.
    """

    def __init__(
        self,
        function: Callable[[list[int], SamplingParams], Any],
        name: str | None = None,
        *,
        takes: frozenset[str] = ALL,
        is_keyed: bool = False,
    ) -> None:
        self._function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.takes, self.is_keyed = frozenset(takes), is_keyed

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Generate for one prompt after another."""
        return [self._answer(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        if params.n > 1 and "n" not in self.takes:
            alone = [replace(params, n=1, seed=mix(params.seed or 0, index) % 2**63) for index in range(params.n)]
            return Answer(tuple(sample for one in alone for sample in self._answer(prompt, one).samples))
        try:
            given = self._function(list(prompt), params)
        except Exception as error:  # a function of the user may raise anything
            raise ConfigError(f"{self.name} fails ({error_with_type(error)})") from error
        several = given if params.n > 1 else [given]
        try:
            samples = tuple(one if isinstance(one, Sample) else Sample(tuple(map(int, one))) for one in several)
        except (TypeError, ValueError):
            what = "a list of samples" if params.n > 1 else "token ids"
            raise ConfigError(f"{self.name} returned {given!r:.60}; n={params.n} requires {what}") from None
        if len(samples) != params.n:
            raise ConfigError(
                f"{self.name} returned {len(samples)} samples for n={params.n}; return a list of {params.n}"
            )
        return Answer(samples)


class TransformersSubject(Subject):
    """``generate`` of transformers: plain, assisted, or with prompt lookup.

    Args:
      model: a loaded transformers model.
      eos_token_ids: tokens that end an output.
      options: keys of the generation config, such as ``prompt_lookup_num_tokens``.
      assistant: assistant model for assisted generation; None for none.
    """

    takes = TRANSFORMERS

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        eos_token_ids: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
        assistant: Any = None,
    ) -> None:
        self.name = name
        self._model, self._assistant = model, assistant
        self._eos = list(eos_token_ids)
        self._options = dict(options or {})

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Generate one sample after another, because assisted generation does not support batches."""
        return [
            Answer(tuple(self._sample(prompt, each, index) for index in range(each.n)))
            for prompt, each in zip(prompts, params, strict=True)
        ]

    def _sample(self, prompt: Sequence[int], params: SamplingParams, index: int) -> Sample:
        import torch

        from foredraft.progress import no_warnings
        from foredraft.verify.generation import generation_config

        config = generation_config(params, self._eos, self._options)
        torch.manual_seed(mix(params.seed or 0, index) % 2**63)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        with torch.inference_mode(), no_warnings():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                assistant_model=self._assistant,
            )
        return Sample(tuple(found[0, len(prompt) :].tolist()))


def asked_for(params: SamplingParams) -> set[str]:
    """Return the fields whose values differ from plain greedy decoding."""
    plain = replace(SamplingParams(temperature=0.0), max_tokens=params.max_tokens, seed=params.seed)
    return {name for name in ALL if getattr(params, name) != getattr(plain, name)}


OPENAI = frozenset({"temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias"})
EXTRAS = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos"})
"""Fields beyond OpenAI's that vLLM and foredraft's server accept under the same names."""

FOREDRAFT = frozenset({"typical_p", "no_repeat_ngram_size", "stop_token_ids"})
"""Further fields that foredraft's server accepts."""

LLAMA_CPP = {"return_tokens": True, "verbose": True, "top_k": 0, "min_p": 0.0, "repeat_last_n": 2**16}
"""Further fields for llama.cpp's server: return token ids, and do not truncate the distribution by default."""


BUSY = (429, 503)
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a request to a busy server is repeated, unless the server names a time."""
LONGEST_PAUSE_SECONDS = 30.0


class ServerSubject(Subject):
    """A server with an OpenAI-compatible API.

    If the server returns token ids, the ids are compared; otherwise the text is. vLLM and foredraft return ids for
    ``return_token_ids``, and llama.cpp has another way. If the server refuses to draw several samples at once, they are
    requested one by one. If the server is busy (429 or 503), the request is repeated. foredraft's server reports its
    prefill chunk size, and whether its acceptance rule keeps the tokens of plain decoding. If the rule does, sampled
    tokens are compared as well.

    Args:
      url: ``http://host:port``, with or without ``/v1``.
      model: the served name; by default the first model in ``/v1/models``.
      api_key: key sent as a bearer token.
      timeout_seconds: time limit of one request.

    Raises: ConfigError if the server does not answer or answers with an error.
    """

    takes = OPENAI | EXTRAS

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout_seconds: float = 120.0
    ) -> None:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is not a number, or a bracket is left open
            is_address = False
        if not is_address:
            raise ConfigError(f"{url!r} is not the address of a server; use http://host:port")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key contains characters that a header cannot; give the key without a line end")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key, self._timeout = api_key, timeout_seconds
        first = self._first_model()
        self._model = model or str(first.get("id"))
        self._is_llama_cpp = first.get("owned_by") == "llamacpp"
        self._takes_extras = first.get("owned_by") in ("foredraft", "vllm")
        if first.get("owned_by") == "foredraft":
            self._is_of_foredraft(first)
        self._draws_several = True
        self.name = f"{self._model} at {parts.netloc}"

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Send one request after another."""
        return [self._answer(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        if params.n > 1 and self._draws_several:
            try:
                return Answer(self._samples(prompt, params))
            except ConfigError:
                self._draws_several = False
        seeds = [None if params.seed is None else mix(params.seed, index) for index in range(params.n)]
        return Answer(tuple(one for seed in seeds for one in self._samples(prompt, replace(params, n=1, seed=seed))))

    def _samples(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Sample, ...]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,  # servers may have another default
            "n": params.n,
            "return_token_ids": True,
        }
        plain = SamplingParams(temperature=params.temperature)
        changed = {name: getattr(params, name) for name in self.takes if getattr(params, name) != getattr(plain, name)}
        if self._takes_extras:  # their defaults come from the served model, so every value is sent
            body |= {name: getattr(params, name) for name in ("top_k", "min_p", "repetition_penalty")}
        body |= LLAMA_CPP if self._is_llama_cpp else {}
        body |= {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        if self._is_llama_cpp and "repetition_penalty" in body:
            body["repeat_penalty"] = body.pop("repetition_penalty")
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.seed is not None:
            body["seed"] = params.seed if self.is_keyed else params.seed % 2**31
        answer = self._ask("/completions", body)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise ConfigError(f"{self.name} returned no list of choices, but {json.dumps(answer):.200}")
        if len(choices) != params.n:
            raise ConfigError(f"{self.name} returned {len(choices)} choices for n={params.n}")
        if self._is_llama_cpp and params.n == 1:
            verbose = answer.get("__verbose")
            choices = [{**choices[0], "token_ids": verbose.get("tokens") if isinstance(verbose, dict) else None}]
        places = [one.get("index") for one in choices]
        if sorted(map(str, places)) == sorted(map(str, range(params.n))):  # without valid indices keep the given order
            choices.sort(key=lambda one: int(one["index"]))
        return tuple(map(_sample, choices))

    def _is_of_foredraft(self, card: Mapping[str, Any]) -> None:
        """Read the facts that foredraft's server lists for a model; older servers list none."""
        size, rule = card.get("prefill_chunk_size"), RULES.get(str(card.get("rejection_sample_method")))
        self.takes |= FOREDRAFT
        self.prefill_chunk_size = size if type(size) is int and size > 0 else None
        self.is_keyed = rule is not None and rule.keeps_tokens

    def _first_model(self) -> Mapping[str, Any]:
        listed = self._ask("/models", None).get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
            raise ConfigError(f"{self._base}/models lists no model; check that this is an OpenAI-compatible server")
        first: Mapping[str, Any] = listed[0]
        return first

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            answer = self._opened(request)
        except urllib.error.HTTPError as error:
            said = ""
            with suppress(OSError, http.client.HTTPException):  # the connection may break while the reason is read
                said = error.read(2_000).decode(errors="replace").strip()
            raise ConfigError(f"{self._base}{path} answered {error.code}: {said[:300]}") from None
        except ValueError:
            raise ConfigError(
                f"{self._base}{path} returned something that is not JSON (a stream or an HTML page?); the server must "
                "answer with one JSON object, as the OpenAI API does"
            ) from None
        except http.client.HTTPException as error:
            raise ConfigError(f"{self._base}{path} broke off its answer ({error!r}); try again") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"{self._base}{path} does not answer ({reason}); check that the server is running"
            ) from None
        if not isinstance(answer, dict):
            raise ConfigError(f"{self._base}{path} returned JSON that is not an object")
        return answer

    def _opened(self, request: urllib.request.Request) -> Any:
        """Return the answer of the server. If the server is busy, repeat the request after the time that it names."""
        pauses = iter(PAUSES_SECONDS)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                pause = next(pauses, None) if error.code in BUSY else None
                if pause is None:
                    raise
                named = error.headers.get("Retry-After", "")
                time.sleep(min(float(named), LONGEST_PAUSE_SECONDS) if named.isdecimal() else pause)


def _sample(choice: Mapping[str, Any]) -> Sample:
    """Return the sample of a choice. Raises ConfigError for a choice with neither token ids nor text."""
    ids, text = choice.get("token_ids"), choice.get("text")
    if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        raise ConfigError(f"the server returned token_ids that are not a list of integers: {json.dumps(ids):.100}")
    text = text if isinstance(text, str) else None
    if ids is None and text is None:
        raise ConfigError("the server returned neither token_ids nor text; check that it serves /v1/completions")
    return Sample(tuple(ids) if ids else None, text)
