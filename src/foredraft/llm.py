"""LLM: the Python front door."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foredraft import forking, zoo
from foredraft.config.acceptance import MATCH
from foredraft.config.engine import Promise
from foredraft.config.keywords import takes_aliases
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig, SpeculativeLike
from foredraft.config.structured import StructuredOutputs
from foredraft.devices import makes_on_cpu
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine, EngineConfig
from foredraft.engine.frontend import RequestOutput, Runner, Stream
from foredraft.engine.governor import Totals
from foredraft.engine.memory import MemoryUse
from foredraft.engine.profiles import Profile
from foredraft.engine.stats import StepProfile
from foredraft.errors import CopyError
from foredraft.loading.info import (
    AUTO,
    announce,
    announce_defaults,
    announce_notes,
    describe,
    eos_token_ids,
    read_generation_config,
    sampling_defaults,
)
from foredraft.loading.models import adapter_of, is_zoo, load_model, load_tokenizer
from foredraft.loading.packed_copy import check_cache_packed
from foredraft.loading.pairing import Pairing, applicable
from foredraft.loading.sources import check_parts
from foredraft.loading.stored import save_compressed
from foredraft.machine import collector_paused
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.dtypes import check_kv_cache_dtype
from foredraft.model.execution.execution import check_kind
from foredraft.model.execution.rounding import check_quantization, check_weights
from foredraft.progress import progress_bar
from foredraft.prompts.prompts import Prompts, chat_prompt, conversations_of, read_params, read_prompts, seeded
from foredraft.structured.grammars import Grammars

ModelLike: TypeAlias = str | os.PathLike[str] | PreTrainedModel
ParamsLike: TypeAlias = SamplingParams | Mapping[str, Any] | Iterable[SamplingParams | Mapping[str, Any]] | None


class LLM:
    """Generates text with a `transformers` causal language model, drafting ahead where that is asked for.

    Without a ``speculative_config`` it decodes plainly; the command line drafts unless it is told not to. What was
    loaded, in which dtype, and how it decodes is logged in one line (logger ``foredraft``, level INFO).

    Calls from several threads give right results; they take turns step by step and share batches.

    Args:
      model: a directory, a hub id, ``zoo:NAME``, a GGUF file, or a loaded model, which keeps its dtype and stays as it
        is.
      speculative_config: how to draft: a mapping, JSON, ``@file``, a method's name, or None, the default, for plain
        decoding. "auto" needs no second model and is what the command line takes where none comes with the model.
      tokenizer: by default the one beside the model; without any, prompts and results are token ids.
      dtype, device: of what is loaded here. "auto" is the GPU where there is one, and the dtype of the checkpoint where
        the device computes in it, else float32; GGUF files with quantised weights count as bfloat16.
      execution: "auto" (on x86 CPUs compiled, or packed where the model is small; else eager), "eager", "packed" or
        "compiled"; see docs/models.md.
      revision, trust_remote_code: of a model from the hub.
      gguf_file: in a directory or at a hub id with several kinds of weights. A GGUF file by its path needs no option.
      quantization: "int8" or "int4" rounds the weights of linear layers to so many bits when they are loaded. The
        rounded model is then the one whose text is wanted, with or without drafts; see docs/weights.md.
      weights: "stored" multiplies by the quantised weights of a GGUF file as they lie in it; the model that they stand
        for, unrounded, is then the one whose text is wanted. Also for zoo:smollm2.
      kv_cache_dtype: "bfloat16" or "int8" rounds keys and values when they are written. The model with that cache is
        then the one whose text is wanted, with or without drafts. "auto" leaves them in the dtype of the model.
      cache_packed: keep packed weights in the cache folder, and read them there the next time; see docs/weights.md.
      seed: makes requests without a seed repeatable: request number i then draws with ``mix(seed, i)``.
      num_cached_prefixes: how many requests that have ended leave their keys and values to prompts that begin like
        them, token by token; 0 keeps none. LLMs made by `with_speculative_config` share those of the target.
      generation_config: "auto" takes defaults of sampling from the ``generation_config.json`` of the model: a request
        that does not set ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` or ``max_tokens``
        has those. "none" leaves them out; a folder has a file of its own. EOS ids of the config count with "auto" and
        "none".
      profile_file: output of ``foredraft tune``; the governor begins with its costs. What it chose is "@FILE".
      max_num_seqs, max_model_len, max_kv_bytes, prefill_chunk_size, exactness: see `EngineConfig`.

    Attributes:
      logs_low_gain: whether rows that end count for the log line about drafts that gain little. Set it to False for
        rows that say nothing about speed.

    Raises:
      CheckpointError: a model or tokenizer is missing, truncated or unknown.
      UnsupportedModelError, ProbeError: the model cannot be decoded exactly; the message says why.
      TokenizerMismatchError: drafter and target do not share a tokenizer.
      ConfigError: an unknown key, or a value out of range.

    Exactness: under the default ``rejection_sample_method="match"`` the tokens equal plain decoding with the same
    seed; under "standard" and "block" they follow the same distribution.
    Randomness: keyed by the seed of the request; without any seed every request draws one and reports it.
    """

    @takes_aliases("LLM")
    @makes_on_cpu
    @collector_paused()
    def __init__(
        self,
        model: ModelLike,
        speculative_config: SpeculativeLike = None,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = "auto",
        execution: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        quantization: str | None = None,
        weights: str | None = None,
        kv_cache_dtype: str = "auto",
        cache_packed: bool = False,
        seed: int | None = None,
        num_cached_prefixes: int = 0,
        generation_config: str | os.PathLike[str] | GenerationConfig = AUTO,
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_model_len: int | None = EngineConfig.max_model_len,
        max_kv_bytes: int | str | None = EngineConfig.max_kv_bytes,
        prefill_chunk_size: int = EngineConfig.prefill_chunk_size,
        exactness: str = EngineConfig.exactness,
        profile_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.engine_config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_kv_bytes=max_kv_bytes,
            prefill_chunk_size=prefill_chunk_size,
            exactness=exactness,
            contains_faults=True,
        )
        self._prefixes = PrefixStore(num_cached_prefixes) if num_cached_prefixes else None
        drafts = SpeculativeConfig.parse(speculative_config)
        # what is wrong with the arguments is said before a model is loaded
        check_kind(execution)
        check_quantization(quantization)
        check_weights(weights, quantization)
        check_kv_cache_dtype(kv_cache_dtype)
        check_cache_packed(cache_packed, execution)
        profile = None if profile_file is None else Profile.load(profile_file)
        check_parts(drafts)
        chosen = None if tokenizer is None else load_tokenizer(tokenizer)
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
            quantization=quantization,
            weights=weights,
            with_tokenizer=chosen is None,
            cache_packed=cache_packed,
        )
        self.tokenizer = chosen if chosen is not None else loaded.tokenizer
        self.target = adapter_of(loaded, execution, kv_cache_dtype)
        self.model_info = describe(loaded, self.target)
        self._pairing = Pairing(
            loaded,
            self.target,
            self.tokenizer,
            zoo_name=str(model) if is_zoo(model) else None,
            execution=execution,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            profile=profile,
            cache_packed=cache_packed,
        )
        self._model_argument = shlex.quote(loaded.name) if loaded.is_owned else "MODEL"
        config = read_generation_config(generation_config, loaded.model)
        self.sampling_defaults = sampling_defaults(config, self.model_info.name)
        self._eos_token_ids = eos_token_ids(loaded.model, config, self.tokenizer)
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self._eos_token_ids)
        self._seed = seed
        self._lock = forking.lock()
        self.logs_low_gain = True
        self._speculate(drafts)
        title = None if speculative_config is None else self.drafting.config.drafters_title
        kept = self.promise if drafts.is_speculative and drafts.rule.keeps_tokens else None
        announce(
            self.model_info,
            title,
            loaded,
            kept,
            drafter=self.drafting.info,
            heads=self.drafting.heads,
            is_dtype_chosen=dtype != "auto",
        )
        announce_defaults(self.sampling_defaults, self.model_info.name)
        if is_zoo(model):
            announce_notes(str(model), [part.method for part in self.drafting.config.parts])

    @makes_on_cpu
    def with_speculative_config(self, speculative_config: SpeculativeLike) -> LLM:
        """The same target in memory with another way of drafting; this LLM stays as it is.

        Raises: as for a new LLM, where the drafter is concerned.
        """
        other = copy.copy(self)
        other._speculate(SpeculativeConfig.parse(speculative_config))
        return other

    def with_chunks_of(self, prefill_chunk_size: int) -> LLM:
        """The same target and drafter with prompts read in chunks of another size; this LLM stays as it is.

        Chunks of another size leave other bits in the cache, so that no prefixes are shared.
        """
        other = copy.copy(self)
        other.engine_config = replace(self.engine_config, prefill_chunk_size=prefill_chunk_size)
        other._prefixes = None
        other._speculate(self.speculative_config)
        return other

    def __repr__(self) -> str:
        info = self.model_info
        return (
            f"LLM({info.name!r}, dtype={info.dtype}, execution={self.target.execution.kind}, "
            f"method={self.speculative_config.title})"
        )

    def __copy__(self) -> LLM:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            "an LLM holds compiled kernels, packed weights and locks, so it can neither be pickled nor deeply copied: "
            "make one in each process, from the name of the model; with_speculative_config(...) gives another one over "
            "the same target. Results, SamplingParams and SpeculativeConfig can be pickled"
        )

    @property
    def promise(self) -> Promise:
        """What texts keep of plain decoding, whatever is drafted."""
        return self.target.promise(self.engine_config.exactness)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of the generation config, and the EOS of the tokenizer."""
        return tuple(self._eos_token_ids)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None where the model has none. vLLM's name of ``tokenizer``."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of a request that sets none: `SamplingParams()` with the defaults of the model."""
        return SamplingParams().filled(self.sampling_defaults)

    def applicable_methods(self) -> list[tuple[str, str | None]]:
        """Every method with None, or with the reason why this model cannot draft with it at present.

        The drafter that this LLM has loaded counts; a model of the zoo brings what its methods need.
        """

        def attempt(config: SpeculativeConfig) -> None:
            has_head = config.method in [
                part.method for part in self.speculative_config.parts if part.model is not None
            ]
            if not has_head and (config.model_part is None or self.drafting.model is None):
                self._pairing.drafting(config)

        return applicable(attempt)

    def _speculate(self, config: SpeculativeConfig) -> None:
        """Draft this way from now on."""
        self.speculative_config = config
        acceptance, limits = config.rejection_sample_method, config.typical_limits
        self.engine_config = replace(self.engine_config, acceptance=acceptance, typical=limits)
        self.drafting = self._pairing.drafting(config)
        self._runner = Runner(self._new_engine, config, self._lock, self._model_argument)

    def save_quantized(self, folder: str | os.PathLike[str]) -> None:
        """Write the model with its weights of 8 or 4 bits into a new folder, in the layout of compressed-tensors.

        ``LLM(folder)`` is then this very model, and says the same with the same bits.

        Raises: ConfigError where its weights are not in 8 or 4 bits, or the folder holds something or cannot be
          written; nothing is left in it then.
        """
        name = self._pairing.zoo_name
        is_instruct = None if name is None else zoo.manifest(name).is_instruct
        save_compressed(self.target.shadow, folder, self.tokenizer, is_instruct)

    # -- generation --------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompts, sampling_params: ParamsLike = None, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
          prompts: text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``, or a list of these.
          sampling_params: one for all prompts, or one for each.
          use_tqdm: show a progress bar; None shows one for several prompts on a terminal.

        Returns: one result per prompt, in order. A row whose logits turn out NaN, or whose logits processor raises,
          ends with the reason "error"; the others are not affected. A drafter that raises only ends its drafting.
        Raises:
          PromptError, ConfigError: before anything runs, naming the prompt.
          NumericsError, or what a logits processor has raised: every sample of every prompt ended in an error.
        """
        with (
            self.stream(prompts, sampling_params) as stream,
            progress_bar(stream.num_prompts, shown=use_tqdm) as tell,
        ):
            for delta in stream:
                if delta.finish_reason is not None:
                    tell(stream.num_finished, stream.num_tokens)
            return stream.outputs()

    @makes_on_cpu
    def stream(self, prompts: Prompts, sampling_params: ParamsLike = None) -> Stream:
        """Like `generate`, yielding every step's text and tokens as they come.

        Closing the stream early, or dropping it, ends its requests; everything else goes on.
        """
        read = read_prompts(prompts, self.tokenizer)
        params = read_params(sampling_params, len(read), self.tokenizer, self.sampling_defaults)
        for given in {id(one): one for one in params}.values():
            self.prepare(given)
        wanted = [partial(seeded, given, self._seed) for given in params]
        with self._lock:
            self.drafting.refresh()
            return self._runner.open(read, wanted, is_counted=self.logs_low_gain)

    def chat(
        self,
        messages: str | Iterable[Mapping[str, Any]] | Iterable[str | Iterable[Mapping[str, Any]]],
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the tokenizer's chat template.

        Args:
          messages: ``[{"role": "user", "content": ...}, ...]``, text as one message of a user, or a list of such
            conversations.
          template_options: variables of the template, ``tools`` and other arguments of ``apply_chat_template``.

        Raises: PromptError for messages that the template does not take, or that take it more than 1 s or 64 MB.
        """
        prompts = [self.chat_prompt(one, **template_options) for one in conversations_of(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, **template_options: Any) -> dict[str, Any]:
        """The prompt of one conversation, for `generate` or `stream`."""
        return chat_prompt(self.tokenizer, messages, **template_options)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Compile what an output must match, while other calls go on; a call that follows finds it done.

        Raises: GrammarError, ConfigError.
        """
        if sampling_params.structured_outputs is not None:
            self._grammars.compile(StructuredOutputs.of(sampling_params.structured_outputs))

    def step(self) -> bool:
        """One step for all streams that are open; whether there was one to make.

        For servers: one thread calls this and hands out what `Stream.take` gives. Nobody else needs it, since whoever
        waits for results makes the steps.
        """
        return self._runner.step()

    @property
    def profile(self) -> StepProfile:
        """Where the time has gone so far."""
        return self._runner.engine.profile

    @property
    def memory(self) -> MemoryUse:
        """Keys and values in memory, and what is planned for them."""
        return self._runner.engine.memory(0 if self._prefixes is None else self._prefixes.num_bytes)

    @property
    def governed(self) -> Totals | None:
        """Steps so far with what plain decoding would have taken, by estimate; None where nothing is governed."""
        governor = self._runner.engine.governor
        return None if governor is None else governor.totals

    @property
    def num_unfinished(self) -> int:
        """Rows that are queued or running."""
        return self._runner.num_unfinished

    @property
    def num_running(self) -> int:
        """Rows that are running."""
        return self._runner.engine.num_running

    # -- set-up ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine(self, drafter: Drafter, **settings: Any) -> Iterator[Engine]:
        """Another engine over the target, with a drafter of one's own; other calls wait meanwhile.

        Args:
          settings: of `EngineConfig`, where they differ; the rule is "match" unless they name another.
        """
        with self._lock:
            self.target.refresh()
            config = replace(self.engine_config, **{"acceptance": MATCH.name, "contains_faults": False, **settings})
            yield Engine(self.target, drafter, config, eos_token_ids=self._eos_token_ids, tokenizer=self.tokenizer)

    def _new_engine(self) -> Engine:
        drafter = self.drafting.new_drafter()
        return Engine(
            self.target,
            drafter,
            self.engine_config,
            eos_token_ids=self._eos_token_ids,
            tokenizer=self.tokenizer,
            prefixes=self._prefixes,
            governor=self.drafting.governor(self.target, drafter),
            grammars=self._grammars,
        )
