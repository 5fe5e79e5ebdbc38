"""The class LLM, the main entry point in Python."""

from __future__ import annotations

import copy
import logging
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
from foredraft.config.engine import Guarantee
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
    drafter_titles,
    eos_token_ids,
    named_generation_config,
    sampling_defaults,
)
from foredraft.loading.models import adapter_of, is_zoo, load_model, load_tokenizer
from foredraft.loading.pairing import Pairing, applicable
from foredraft.loading.sources import check_parts
from foredraft.loading.stored import save_compressed
from foredraft.machine import collector_paused
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.dtypes import check_kv_cache_dtype
from foredraft.model.execution.execution import check_kind
from foredraft.model.execution.rounding import check_activations, check_quantization, check_weights
from foredraft.progress import progress_bar, stage
from foredraft.prompts.prompts import Prompts, chat_prompt, conversations_of, read_params, read_prompts, seeded
from foredraft.structured.grammars import Grammars

ModelLike: TypeAlias = str | os.PathLike[str] | PreTrainedModel
ParamsLike: TypeAlias = SamplingParams | Mapping[str, Any] | Iterable[SamplingParams | Mapping[str, Any]] | None


class LLM:
    """Generates text with a `transformers` causal language model, with speculative decoding if requested.

    Without a ``speculative_config`` an `LLM` decodes plainly. The command line, in contrast, drafts by default. One log
    line (logger ``foredraft``, level INFO) states which model was loaded, in which dtype, and how it decodes.

    Calls from several threads are safe. Concurrent calls share batches and take turns step by step.

    Args:
      model: a directory, a hub id, ``zoo:NAME``, a GGUF file, or a loaded model. A loaded model keeps its dtype and is
        not changed.
      speculative_config: method of drafting and its options: a mapping, JSON, ``@file``, the name of a method, or None
        (the default) for plain decoding. "auto" needs no second model. The command line uses "auto" if the model
        includes no drafter.
      tokenizer: tokenizer, its folder or its hub id; by default the one in the folder of the model. Without any
        tokenizer, prompts and results are token ids.
      dtype, device: dtype and device of models that are loaded by name. "auto" selects the GPU if there is one. For the
        dtype, "auto" selects the checkpoint's if the device computes in it, else float32. GGUF files with quantised
        weights count as bfloat16.
      execution: "auto", "eager", "packed" or "compiled"; see docs/models.md. On x86 CPUs "auto" selects "compiled", or
        "packed" if the model is small; elsewhere "eager".
      revision, trust_remote_code: options for a model from the hub, as in `transformers`.
      gguf_file: name of the GGUF file in a directory or at a hub id with several kinds of weights. A GGUF file given by
        its path does not need this option.
      quantization: "int8" or "int4" rounds the weights of linear layers to this many bits when they are loaded. The
        rounded model is then the target: its output is preserved, with or without drafts. See docs/weights.md.
      weights: "stored" computes directly with the quantised weights of a GGUF file, without rounding them to another
        dtype. The model with these exact weights is then the target. "stored" also works for zoo:smollm2. "dequantized"
        converts the weights to the dtype. None is "stored" for a quantised GGUF file on a CPU with kernels.
      kv_cache_dtype: "bfloat16" or "int8" rounds keys and values when they are written. The model with that cache is
        then the target, with or without drafts. "auto" leaves keys and values in the dtype of the model.
      activations: "int8" rounds the inputs of layers with integer weights to 8 bits instead of 16. Steps over many
        tokens are then faster, and the model changes a little. The model with these activations is then the target.
      seed: seed for requests that set none. Request number i then draws with ``mix(seed, i)``, so results are
        repeatable.
      num_cached_prefixes: number of finished requests whose keys and values are kept. Prompts that begin with the same
        tokens reuse them. 0 keeps none. An LLM made by `with_speculative_config` shares the prefixes of the target.
      generation_config: source of sampling defaults. "auto" reads the ``generation_config.json`` of the model. A
        request that does not set ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` or
        ``max_tokens`` uses the values found there. "none" ignores that file. A folder uses the file in that folder. The
        EOS ids of the model's config count with "auto" and with "none".
      profile_file: output of ``foredraft tune``. The governor starts with the measured costs in it. To use the method
        that ``tune`` chose, pass "@FILE" as ``speculative_config``.
      max_num_seqs, max_model_len, max_kv_bytes, prefill_chunk_size, exactness: see `EngineConfig`.

    Attributes:
      logs_low_gain: True if finished rows count for the log line about drafts that gain little. Set ``logs_low_gain``
        to False for rows whose speed is not representative.

    Raises:
      CheckpointError: a model or tokenizer is missing, truncated or unknown.
      UnsupportedModelError, ProbeError: the model cannot be decoded exactly; the message gives the reason.
      TokenizerMismatchError: drafter and target do not share a tokenizer.
      ConfigError: an unknown key, or a value out of range.

    Exactness: under the default ``rejection_sample_method="match"`` the tokens equal plain decoding with the same seed.
      Under "standard" and "block" they have the same distribution.
    Randomness: keyed by the seed of the request. A request without any seed draws one and reports it.
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
        activations: str | None = None,
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
        # wrong arguments are reported before a model is loaded
        check_kind(execution)
        check_quantization(quantization)
        check_weights(weights, quantization)
        check_kv_cache_dtype(kv_cache_dtype)
        check_activations(activations)
        profile = None if profile_file is None else Profile.load(profile_file)
        check_parts(drafts)
        defaults = named_generation_config(generation_config)
        chosen = None if tokenizer is None else load_tokenizer(tokenizer)
        if isinstance(model, (str, os.PathLike)):
            stage(f"loading {os.fspath(model)}")
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
            max_model_len=max_model_len,
        )
        self.tokenizer = chosen if chosen is not None else loaded.tokenizer
        stage(f"preparing and testing {loaded.name}", logging.DEBUG)
        self.target = adapter_of(loaded, execution, kv_cache_dtype, activations)
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
        )
        self._model_argument = shlex.quote(loaded.name) if loaded.is_owned else "MODEL"
        own = getattr(loaded.model, "generation_config", None)
        config = own if defaults == AUTO else None if isinstance(defaults, str) else defaults
        self.sampling_defaults = sampling_defaults(config, self.model_info.name)
        self._eos_token_ids = eos_token_ids(loaded.model, config, self.tokenizer)
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self._eos_token_ids)
        self._seed = seed
        self._lock = forking.lock()
        self.logs_low_gain = True
        if drafts.is_speculative:
            stage(f"loading the drafters of {loaded.name}", logging.DEBUG)
        self._speculate(drafts)
        title = None if speculative_config is None else self.drafting.config.drafters_title
        announce(
            self.model_info,
            title,
            loaded,
            self.guarantee if drafts.is_speculative else None,
            rule=drafts.rule,
            drafters=drafter_titles(self.drafting.config),
            drafter=self.drafting.info,
            heads=self.drafting.heads,
            is_dtype_chosen=dtype != "auto",
        )
        announce_defaults(self.sampling_defaults, self.model_info.name)
        if is_zoo(model):
            announce_notes(str(model), [part.method for part in self.drafting.config.parts])

    @makes_on_cpu
    def with_speculative_config(self, speculative_config: SpeculativeLike) -> LLM:
        """Return an LLM with the same target in memory and another method of drafting. This LLM does not change.

        Raises: the errors of a new LLM that concern the drafter.
        """
        other = copy.copy(self)
        other._speculate(SpeculativeConfig.parse(speculative_config))
        return other

    def with_chunks_of(self, prefill_chunk_size: int) -> LLM:
        """Return an LLM with the same target and drafter and another chunk size for prompts. This LLM does not change.

        Prefixes are not shared, because another chunk size leaves different bits in the cache.
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
            "an LLM contains compiled kernels, packed weights and locks, so it cannot be pickled or deeply copied. "
            "Create one in each process from the name of the model; with_speculative_config(...) returns another LLM "
            "over the same target. Results, SamplingParams and SpeculativeConfig can be pickled"
        )

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee for outputs compared with plain decoding, whatever is drafted: bitwise, or up to rounding."""
        return self.target.guarantee(self.engine_config.exactness)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a row: the EOS tokens of the generation config and of the tokenizer."""
        return tuple(self._eos_token_ids)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer, or None if the model has none. Same name as in vLLM."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that sets none: `SamplingParams()` with the defaults of the model."""
        return SamplingParams().filled(self.sampling_defaults)

    def applicable_methods(self) -> list[tuple[str, str | None]]:
        """List every method with None, or with the reason why this model cannot draft with it at present.

        The drafter that the `LLM` has loaded counts as available. Models of the zoo include the drafters that their
        methods need.
        """

        def attempt(config: SpeculativeConfig) -> None:
            has_head = config.method in [
                part.method for part in self.speculative_config.parts if part.model is not None
            ]
            if not has_head and (config.model_part is None or self.drafting.model is None):
                self._pairing.drafting(config)

        return applicable(attempt)

    def _speculate(self, config: SpeculativeConfig) -> None:
        """Switch to another method of drafting."""
        self.speculative_config = config
        acceptance, limits = config.rejection_sample_method, config.typical_limits
        self.engine_config = replace(self.engine_config, acceptance=acceptance, typical=limits)
        self.drafting = self._pairing.drafting(config)
        self._runner = Runner(self._new_engine, config, self._lock, self._model_argument)

    def save_quantized(self, folder: str | os.PathLike[str]) -> None:
        """Write the model with its weights of 8 or 4 bits into a new folder, in the layout of compressed-tensors.

        ``LLM(folder)`` then loads the same model and returns the same output, bit for bit.

        Raises: ConfigError if the weights are not in 8 or 4 bits, or if the folder is not empty or cannot be written.
        Nothing is left in the folder then.
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
          sampling_params: parameters for all prompts, or a list with one per prompt.
          use_tqdm: True to show a progress bar; None shows one for several prompts on a terminal.

        Returns: one result per prompt, in order. A row ends with the reason "error" if its logits become NaN or its
        logits processor raises. Other rows are not affected. If a drafter raises, the row goes on without drafts.
        Raises:
          PromptError, ConfigError: a prompt or a parameter is invalid. Nothing has run then. The message names the
            prompt.
          NumericsError, or the error of a logits processor: every sample of every prompt ended in an error.
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
        """Like `generate`, but yields the text and tokens of every step as they arrive.

        Closing the stream early, or dropping it, ends its requests. Other requests go on.
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
          messages: one conversation ``[{"role": "user", "content": ...}, ...]``, a string as a single user message, or
            a list of conversations.
          template_options: variables of the template, ``tools`` and other arguments of ``apply_chat_template``.

        Raises: PromptError for messages that the template rejects, or that need more than 1 s or 64 MB to render.
        """
        prompts = [self.chat_prompt(one, **template_options) for one in conversations_of(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Any, **template_options: Any) -> dict[str, Any]:
        """Render one conversation as a prompt for `generate` or `stream`."""
        return chat_prompt(self.tokenizer, messages, **template_options)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Compile the grammar of a request in advance, while other calls go on.

        Raises: GrammarError, ConfigError.
        """
        if sampling_params.structured_outputs is not None:
            self._grammars.compile(StructuredOutputs.of(sampling_params.structured_outputs))

    def step(self) -> bool:
        """Run one step for all open streams; return False if there was nothing to do.

        Only servers need `step`: one thread calls it and distributes the results of `Stream.take`. Elsewhere the caller
        that waits for results runs the steps.
        """
        return self._runner.step()

    @property
    def profile(self) -> StepProfile:
        """Time spent in each part of the steps."""
        return self._runner.engine.profile

    @property
    def memory(self) -> MemoryUse:
        """Memory of keys and values, in use and planned."""
        return self._runner.engine.memory(0 if self._prefixes is None else self._prefixes.num_bytes)

    @property
    def governed(self) -> Totals | None:
        """Totals over all steps, with the estimated time of plain decoding; None without a governor."""
        governor = self._runner.engine.governor
        return None if governor is None else governor.totals

    @property
    def num_unfinished(self) -> int:
        """Number of rows that are queued or running."""
        return self._runner.num_unfinished

    @property
    def num_running(self) -> int:
        """Number of rows that are running."""
        return self._runner.engine.num_running

    # -- set-up ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine(self, drafter: Drafter, **settings: Any) -> Iterator[Engine]:
        """Provide another engine over the target, with the given drafter. Other calls wait until the block ends.

        Args:
          settings: fields of `EngineConfig` that differ from those of this LLM. The rule is "match" unless
            ``acceptance`` is given.
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
