"""Served models: one model under several names, each with its way of drafting."""

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
"""Tokens of the prompt and of the texts that are generated before the server says it is ready, in two rows, so that all
is compiled: the layers of prompts of more tokens than a step has nodes, too."""


class Served:
    """Model in memory, and the ways of drafting that requests may choose from.

    Args:
      llms: `LLM` objects over one target, by name; the first is the default.
      aliases: further names of the default.
    """

    def __init__(self, llms: Mapping[str, LLM], aliases: tuple[str, ...] = ()) -> None:
        self.name = next(iter(llms))
        self.llm = llms[self.name]
        self.names: dict[str, LLM] = {**llms, **dict.fromkeys(aliases, self.llm)}

    @property
    def llms(self) -> list[LLM]:
        """`LLM` objects, one for each way of drafting."""
        return list(dict.fromkeys(self.names.values()))

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model.

        Raises: ApiError where it has none.
        """
        if self.llm.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids to /v1/completions", code="no_tokenizer")
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int | None:
        """Limit of prompt and output together; None where the model knows none."""
        limits = [self.llm.engine_config.max_model_len, self.llm.model_info.context_length]
        return min((limit for limit in limits if limit is not None), default=None)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens that may be generated."""
        return self.llm.target.vocab_size

    @cached_property
    def num_embeddings(self) -> int:
        """Number of tokens that a prompt may have."""
        return self.llm.target.num_embeddings

    def encode(self, text: str, add_special_tokens: bool, *, is_cut: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
          is_cut: whether it is cut where it is too long.

        Raises: ApiError for one that cannot fit, or without a tokenizer; PromptError for half a surrogate pair.
        """
        tokenizer = self.tokenizer
        if not is_cut:
            self.check_length(text, "prompt")
        return encode(tokenizer, text, add_special_tokens)

    def check_length(self, text: str, name: str) -> None:
        """Raises: ApiError for a text that cannot fit, whatever its tokens: it is not read at all."""
        most = self._most_characters
        if most is not None and len(text) > most:
            message = f"This model's maximum context length is {self.max_model_len} tokens, which are at most {most} "
            message += f"characters, and the {name} has {len(text)}; shorten it"
            raise ApiError(400, message, name, "context_length_exceeded")

    @cached_property
    def _most_characters(self) -> int | None:
        """Number of characters of the longest text that may fit; None where that is unknown."""
        each, limit = characters_per_token(self.llm.tokenizer), self.max_model_len
        return None if each is None or limit is None else each * limit

    def choose(self, model: str, speculative: Any) -> tuple[LLM, int | None]:
        """The LLM that a request asks for, and its limit for drafts, None for the LLM's own.

        Args:
          model: a served name; empty for the default.
          speculative: false; a served name or a method that the server holds; an object with num_speculative_tokens
            and method; true or None for what the name stands for.

        Raises: ApiError for a name that is not served (404), or a method that the server does not hold.
        """
        if model and model not in self.names:
            message = f"the model {shown(model)} does not exist; served are {', '.join(self.names)}"
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
            message = f"the server holds no drafter {shown(method)}; it holds {', '.join(held)}"
            raise ApiError(400, message, "speculative", "drafter_not_found")
        return held[method], length

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change bits of a text.

        Covers all weights, the config, exactness, the way of running, the kind of processor, and versions.
        """
        llm, target = self.llm, self.llm.target
        facts = [
            __version__,
            torch.__version__,
            transformers.__version__,
            llm.engine_config.exactness,
            llm.engine_config.prefill_chunk_size,
            llm.promise.kind,
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
        """Changes with the weights, their shapes, dtypes and rounding: what one began, another must not continue."""
        target = self.llm.target
        digest = hashlib.sha256(f"{target.quantization}{target.kv_dtype or ''}".encode())
        for name, weight in target.shadow.named_parameters():
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        for name, sums in weight_sums(target.shadow):
            digest.update(name.encode() + sums.cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def warm(self) -> None:
        """Generate something in every way of drafting, so that the first request finds all compiled.

        Where llguidance is installed, a grammar is compiled too: with the first one llguidance reads the tokenizer, in
        one call that keeps all other threads from running.
        """
        for llm in self.llms:
            with suppress(ConfigError):  # which the first request with a grammar is told
                llm.prepare(SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])))
        prompt = [token % 4 % self.vocab_size for token in range(1, WARM_PROMPT + 1)]
        params = SamplingParams(n=2, max_tokens=WARM_TOKENS, ignore_eos=True, seed=0, detokenize=False)
        for llm in self.llms:
            room = (self.max_model_len or len(prompt) * 4) - 2
            llm.logs_low_gain = False
            llm.generate([{"prompt_token_ids": prompt[: max(1, room // 2)]}], params, use_tqdm=False)
            llm.logs_low_gain = True
            _ = llm.memory  # asks the drafter for its caches in this thread, between steps


KV_PERCENT = 40
"""Default limit of keys and values, as a percentage of the memory that is free once the model is loaded. Kept prefixes
take a quarter of it on top, and activations some of the rest."""
NO_LIMIT = "none"


def with_kv_limit(options: Mapping[str, Any], num_engines: int) -> dict[str, Any]:
    """Arguments of `LLM` with a limit for keys and values, unless they have one.

    A device that does not tell its free memory has none by default.

    Args:
      options: may have "none" as ``max_kv_bytes``, for no limit.
      num_engines: engines that share the memory; each gets the same part of it.
    """
    given = options.get("max_kv_bytes")
    if given is not None:
        return {**options, "max_kv_bytes": None if str(given).lower() == NO_LIMIT else given}
    if available_on(choose_device(options.get("device", "auto"))) is None:
        logger.info(
            "keys and values: no limit, since the device does not tell how much memory is free; max_kv_bytes sets one."
        )
        return dict(options)
    return {**options, "max_kv_bytes": default_share(num_engines)}


def default_share(num_engines: int) -> str:
    """Default limit of each of so many engines, as `EngineConfig.max_kv_bytes` takes it."""
    return f"{KV_PERCENT / num_engines:.3g}%"


@dataclass(frozen=True)
class ServedModels:
    """Names that requests may ask for, read before any weight is.

    Args:
      names: names of the model; answers have the first.
      draftings: further ways of drafting, by their names.
      chat_template: in place of the model's own.
    """

    names: tuple[str, ...]
    draftings: Mapping[str, SpeculativeConfig]
    chat_template: str | None = None

    @classmethod
    def of(cls, names: Sequence[str], given: Sequence[str] = (), chat_template: str | None = None) -> ServedModels:
        """Names and ways of drafting that a user gave.

        Args:
          given: ``NAME=METHOD``, or JSON in place of the method.

        Raises: ConfigError for names that are empty or given twice, a drafting that is not of that form or not valid,
          and a template that is none.
        """
        for place, name in enumerate(names):
            if not name.strip() or name in names[:place]:
                what = "twice" if name.strip() else "and says nothing"
                raise ConfigError(f"served_model_name {name!r} is given {what}; give each name once")
        draftings: dict[str, SpeculativeConfig] = {}
        for one in given:
            name, equals, config = one.partition("=")
            if not equals or not name.strip() or not config:
                raise ConfigError(f"drafting is {one!r}; give NAME=METHOD or NAME=JSON, such as lookup=ngram")
            if name in names or name in draftings:
                raise ConfigError(f"drafting is {one!r}, and {name!r} is served already; give it another name")
            try:
                draftings[name] = SpeculativeConfig.parse(config)
            except ConfigError as error:
                raise ConfigError(f"drafting {name!r}: {error}") from None
        if chat_template is not None:
            _check_template(chat_template)
        return cls(tuple(names), draftings, chat_template)

    @property
    def num_engines(self) -> int:
        """Engines of one process: one for each way of drafting."""
        return 1 + len(self.draftings)

    def check_files(self) -> None:
        """Raises: CheckpointError, ConfigError for a file of a drafting that is not on this machine."""
        for config in self.draftings.values():
            check_parts(config)

    def over(self, llm: LLM) -> Served:
        """Served models over a model in memory.

        Raises: ConfigError and the like for a drafting that the model does not have.
        """
        if self.chat_template is not None and llm.tokenizer is not None:
            llm.tokenizer.chat_template = self.chat_template
        drafting = {name: llm.with_speculative_config(config) for name, config in self.draftings.items()}
        return Served({self.names[0]: llm, **drafting}, self.names[1:])


def _check_template(text: str) -> None:
    """Raises: ConfigError for a template that cannot be read."""
    try:
        renderer().render(text, None)
    except TemplateFailure as error:
        raise ConfigError(f"chat_template cannot be read: {error}; give a template of Jinja") from None
