"""Served models: one model under several names, each with its own drafting method."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers

from foredraft import __version__
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.config.structured import StructuredOutputs
from foredraft.engine.memory import available_on
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.loading.models import choose_device
from foredraft.loading.sources import check_parts
from foredraft.machine import cpu_digest
from foredraft.model.execution.packing import weight_sums
from foredraft.native.abi import MOST_NODES
from foredraft.prompts.templates import TemplateFailure, renderer
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import shown, wrong_field
from foredraft.serve.tokens import characters_per_token, encode

logger = logging.getLogger("foredraft")

WARM_PROMPT, WARM_TOKENS = MOST_NODES + 16, 24
"""Number of tokens in the warm-up prompt and in each of its two outputs. The prompt has more tokens than a step has
nodes, so that the kernels for long prompts are compiled too."""


class Served:
    """Model in memory and the drafting methods that requests may choose.

    Args:
      llms: `LLM` objects that share one target, by name; the first is the default.
      aliases: additional names of the default.
    """

    def __init__(self, llms: Mapping[str, LLM], aliases: tuple[str, ...] = ()) -> None:
        self.name = next(iter(llms))
        self.llm = llms[self.name]
        self.names: dict[str, LLM] = {**llms, **dict.fromkeys(aliases, self.llm)}

    @property
    def llms(self) -> list[LLM]:
        """`LLM` objects, one for each drafting method."""
        return list(dict.fromkeys(self.names.values()))

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model.

        Raises: ApiError if the model has no tokenizer.
        """
        if self.llm.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids to /v1/completions", code="no_tokenizer")
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens in prompt and output together; None if the model sets no limit."""
        limits = [self.llm.engine_config.max_model_len, self.llm.model_info.context_length]
        return min((limit for limit in limits if limit is not None), default=None)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids that the model can generate."""
        return self.llm.target.vocab_size

    @cached_property
    def num_embeddings(self) -> int:
        """Number of token ids that a prompt may contain."""
        return self.llm.target.num_embeddings

    def encode(self, text: str, add_special_tokens: bool, *, is_cut: bool = False) -> list[int]:
        """Tokenize a prompt.

        Args:
          is_cut: whether a prompt that is too long will be truncated instead of refused.

        Raises: ApiError if the text is too long or the model has no tokenizer; PromptError for an unpaired surrogate.
        """
        tokenizer = self.tokenizer
        if not is_cut:
            self.check_length(text, "prompt")
        return encode(tokenizer, text, add_special_tokens)

    def check_length(self, text: str, name: str) -> None:
        """Refuse a text that is too long for the context whatever its tokens are, before it is tokenized.

        Raises: ApiError.
        """
        most = self._most_characters
        if most is not None and len(text) > most:
            message = f"This model's maximum context length is {self.max_model_len} tokens, or at most {most} "
            message += f"characters, and the {name} has {len(text)} characters; shorten it"
            raise ApiError(400, message, name, "context_length_exceeded")

    @cached_property
    def _most_characters(self) -> int | None:
        """Maximum number of characters in a text that may fit the context; None if it is unknown."""
        each, limit = characters_per_token(self.llm.tokenizer), self.max_model_len
        return None if each is None or limit is None else each * limit

    def choose(self, model: str, speculative: Any) -> tuple[LLM, int | None]:
        """Return the `LLM` for a request and its limit on draft tokens. If the limit is None, that of the `LLM` is
        used.

        Args:
          model: served name; empty for the default.
          speculative: false for plain decoding; a served name or a method of this server; an object with
            num_speculative_tokens and method; true or None for the method of the served name.

        Raises: ApiError (404) for a name that is not served; ApiError (400) for a method that this server does not
          have.
        """
        if model and model not in self.names:
            message = f"the model {shown(model)} does not exist; the served models are {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")
        llm = self.names[model or self.name]
        if speculative is None or isinstance(speculative, bool):
            return llm, 0 if speculative is False else None
        given = {"method": speculative} if isinstance(speculative, str) else speculative
        if not isinstance(given, dict) or given.keys() - {"method", "num_speculative_tokens"}:
            what = "true, false, a method, or an object with num_speculative_tokens and method"
            wrong_field("speculative", speculative, what)
        length = given.get("num_speculative_tokens")
        if length is not None and (type(length) is not int or not 0 <= length <= 1024):
            wrong_field("speculative.num_speculative_tokens", length, "a whole number between 0 and 1024")
        method = given.get("method")
        return (llm, length) if method is None else self._with_method(method, length, llm)

    def _with_method(self, method: Any, length: int | None, llm: LLM) -> tuple[LLM, int | None]:
        if method == "none":
            return llm, 0
        held = {llm.speculative_config.title: llm for llm in self.llms} | self.names
        if not isinstance(method, str) or method not in held:
            message = f"this server has no drafting method {shown(method)}; it has {', '.join(held)}"
            raise ApiError(400, message, "speculative", "drafter_not_found")
        return held[method], length

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that may change bits of the output.

        The fingerprint covers the weights, model config, exactness, execution, CPU type and library versions.
        """
        llm, target = self.llm, self.llm.target
        facts = [
            __version__,
            torch.__version__,
            transformers.__version__,
            llm.engine_config.exactness,
            llm.engine_config.prefill_chunk_size,
            llm.guarantee.kind,
            target.execution.kind,
            str(target.device),
            torch.get_num_threads(),
            cpu_digest(),
            llm.model_info.architecture,
            str(target.dtype),
            llm.model_info.num_parameters,
            target.shadow.config.to_json_string(),
        ]
        return f"fp_foredraft_{hashlib.sha256(json.dumps([*facts, self.weights]).encode()).hexdigest()[:12]}"

    @cached_property
    def weights(self) -> str:
        """Hash of the weights, their shapes, dtypes and quantization. Only a replica with the same hash may continue a
        request."""
        target = self.llm.target
        digest = hashlib.sha256(f"{target.quantization}{target.kv_dtype or ''}{target.activations or ''}".encode())
        for name, weight in target.shadow.named_parameters():
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        for name, sums in weight_sums(target.shadow):
            digest.update(name.encode() + sums.cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def warm(self) -> None:
        """Generate a few tokens with every drafting method, so that all kernels are compiled before the first request.

        If llguidance is installed, a grammar is compiled too. llguidance reads the tokenizer for its first grammar, in
        one call that blocks all other threads.
        """
        for llm in self.llms:
            with suppress(ConfigError):  # the first request with a grammar reports the error
                llm.prepare(SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])))
        prompt = [token % 4 % self.vocab_size for token in range(1, WARM_PROMPT + 1)]
        params = SamplingParams(n=2, max_tokens=WARM_TOKENS, ignore_eos=True, seed=0, detokenize=False)
        for llm in self.llms:
            room = (self.max_model_len or len(prompt) * 4) - 2
            llm.logs_low_gain = False
            llm.generate([{"prompt_token_ids": prompt[: max(1, room // 2)]}], params, use_tqdm=False)
            llm.logs_low_gain = True
            _ = llm.memory  # collects the drafter's caches in this thread, between steps


KV_PERCENT = 40
"""Default limit of the keys and values, as a percentage of the memory that is free after the model has been loaded.
Cached prefixes may take another quarter of the limit, and activations use some of the remaining memory."""
NO_LIMIT = "none"


def with_kv_limit(options: Mapping[str, Any], num_engines: int) -> dict[str, Any]:
    """Return the arguments of `LLM` with a limit for keys and values, unless the caller has set one.

    On a device that does not report its free memory, there is no default limit.

    Args:
      options: arguments of `LLM`; the value "none" of ``max_kv_bytes`` means no limit.
      num_engines: number of engines that share the memory in equal parts.
    """
    given = options.get("max_kv_bytes")
    if given is not None:
        return {**options, "max_kv_bytes": None if str(given).lower() == NO_LIMIT else given}
    if available_on(choose_device(options.get("device", "auto"))) is None:
        logger.info(
            "keys and values: no limit, because the device does not report its free memory; max_kv_bytes "
            "(--max-kv-bytes) sets a limit."
        )
        return dict(options)
    return {**options, "max_kv_bytes": default_share(num_engines)}


def default_share(num_engines: int) -> str:
    """Default limit of each engine when several share the memory, in the format of `EngineConfig.max_kv_bytes`."""
    return f"{KV_PERCENT / num_engines:.3g}%"


@dataclass(frozen=True)
class ServedModels:
    """Names and drafting methods to serve, checked before the model is loaded.

    Args:
      names: served names of the model; responses contain the first.
      draftings: additional drafting methods by served name.
      chat_template: template that replaces the model's own.
    """

    names: tuple[str, ...]
    draftings: Mapping[str, SpeculativeConfig]
    chat_template: str | None = None

    @classmethod
    def of(cls, names: Sequence[str], given: Sequence[str] = (), chat_template: str | None = None) -> ServedModels:
        """Parse the names and drafting methods that a user gave.

        Args:
          given: entries ``NAME=METHOD`` or ``NAME=JSON``.

        Raises: ConfigError for an empty or repeated name, an invalid drafting method, or an invalid template.
        """
        for place, name in enumerate(names):
            if not name.strip() or name in names[:place]:
                what = "given twice" if name.strip() else "empty"
                raise ConfigError(f"served_model_name {name!r} is {what}; give each name once")
        draftings: dict[str, SpeculativeConfig] = {}
        for one in given:
            name, equals, config = one.partition("=")
            if not equals or not name.strip() or not config:
                raise ConfigError(f"drafting is {one!r}; give NAME=METHOD or NAME=JSON, such as lookup=ngram")
            if name in names or name in draftings:
                raise ConfigError(f"drafting is {one!r}, but the name {name!r} is already served; choose another name")
            try:
                draftings[name] = SpeculativeConfig.parse(config)
            except ConfigError as error:
                raise ConfigError(f"drafting {name!r}: {error}") from None
        if chat_template is not None:
            _check_template(chat_template)
        return cls(tuple(names), draftings, chat_template)

    @property
    def num_engines(self) -> int:
        """Number of engines in one process, one for each drafting method."""
        return 1 + len(self.draftings)

    def check_files(self) -> None:
        """Check that the files of all drafting methods exist.

        Raises: CheckpointError, ConfigError for a file that is not on this machine.
        """
        for config in self.draftings.values():
            check_parts(config)

    def over(self, llm: LLM) -> Served:
        """Return the served models for a model in memory.

        Raises: ConfigError or another error for a drafting method that does not work with the model.
        """
        if self.chat_template is not None and llm.tokenizer is not None:
            llm.tokenizer.chat_template = self.chat_template
        drafting = {name: llm.with_speculative_config(config) for name, config in self.draftings.items()}
        return Served({self.names[0]: llm, **drafting}, self.names[1:])


def _check_template(text: str) -> None:
    """Raise ConfigError for a template that is not valid Jinja."""
    try:
        renderer().render(text, None)
    except TemplateFailure as error:
        raise ConfigError(f"chat_template cannot be read: {error}; give a valid Jinja template") from None
