"""`speculate` and `Speculation`, the callable that it returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from foredraft import forking, zoo
from foredraft.config.engine import EngineConfig
from foredraft.config.keywords import strings
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig, SpeculativeLike
from foredraft.devices import makes_on_cpu
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.stats import RowStats, describe_drafting
from foredraft.errors import ConfigError, CopyError, PromptError
from foredraft.hf import refusals
from foredraft.hf.call import Call
from foredraft.hf.refusals import GenerateArguments
from foredraft.hf.rows import Columns, Endings, check_positions, read_rows
from foredraft.loading.adapters import Adapter, shared_adapter
from foredraft.loading.models import load_tokenizer
from foredraft.loading.pairing import Drafting
from foredraft.model.dtypes import check_kv_cache_dtype
from foredraft.model.execution.execution import check_kind
from foredraft.model.execution.rounding import check_activations, check_quantization
from foredraft.model.lm import CausalLM
from foredraft.model.support import check_unwrapped
from foredraft.progress import stage_if_slow


def speculate(
    method: SpeculativeLike = None,
    *,
    streamer: Any = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    stop_strings: str | Iterable[str] | None = None,
    execution: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    activations: str | None = None,
    **speculative_config: Any,
) -> Speculation:
    """Return a callable for ``model.generate(..., custom_generate=speculate(...))``.

    The callable can be used for several models, for several calls and from several threads. ``generate`` works as
    before: its configuration, logits processors, stopping criteria and results are those of plain generation.

    Args:
      method: name of a drafting method, a mapping or a `SpeculativeConfig`. The default, "auto", chooses by measured
        time between plain decoding, `suffix` and the drafters that are included with the model.
      streamer: streamer that receives the prompt and every token, and is ended. ``generate(streamer=...)`` works, too.
      tokenizer: tokenizer of the target, for stop strings and to check that a draft model has the same tokenizer.
      stop_strings: strings that end a row at the token that completes one. ``generate`` cannot pass its own to a
        callable.
      execution: "auto", "eager", "packed" or "compiled". "compiled" needs a CPU and a C++ compiler. The first call
        compiles the decoder layers, which takes about ten seconds; later processes read them from the disk.
      quantization: "int8" or "int4": decode with linear layers rounded to 8 or 4 bits. The model keeps its weights.
      kv_cache_dtype: "bfloat16" or "int8": round keys and values when they are written to the cache.
      activations: "int8": round the inputs of layers with integer weights to 8 bits instead of 16.
      speculative_config: further keys of the method; see `SpeculativeConfig`.

    Raises: ConfigError for an unknown key or execution, a value out of range, or stop strings without a tokenizer.

    Exactness: without sampling, the sequences equal those of plain ``generate``. With sampling, the sequences have the
      same distribution. Under the default ``rejection_sample_method="match"`` every method gives the tokens of
      ``speculate("none")``. With ``quantization``, ``kv_cache_dtype`` or ``activations``, the guarantee refers to the
      rounded model.
    Randomness: one draw from torch's global generator per sampled call; ``torch.manual_seed`` repeats a call.
    """
    check_kind(execution)
    check_quantization(quantization)
    check_kv_cache_dtype(kv_cache_dtype)
    check_activations(activations)
    return Speculation(
        _config(method, speculative_config),
        streamer=streamer,
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        stop_strings=stop_strings,
        runs_by=(execution, quantization, kv_cache_dtype, activations),
    )


def _config(method: SpeculativeLike, keys: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the config of a method given by name and keys, or of a whole config.

    Raises: ConfigError for invalid values, and for keys in addition to a whole config.
    """
    if method is None or isinstance(method, str):
        return SpeculativeConfig(method=method, **keys)
    if keys:
        raise ConfigError(
            f"speculate got a config and also {', '.join(map(repr, keys))}; put these keys into the config"
        )
    return SpeculativeConfig.parse(method)


class Speculation:
    """Callable that decodes speculatively inside ``generate``, made by `speculate`.

    Attributes:
      config: method and keys of drafting.
      stats: counters over all calls.
      governor: latest decision of the governor with its reasons, and the estimated speed-up of the latest call, as in
        `foredraft.RequestMetrics`. None before the first call, and if there is no governor.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_strings: str | Iterable[str] | None = None,
        runs_by: tuple[str, str | None, str, str | None] = ("auto", None, "auto", None),
    ) -> None:
        self.config = config
        self.stats = RowStats()
        self.governor: Mapping[str, Any] | None = None
        self._streamer, self._tokenizer = streamer, tokenizer
        self._runs_by = runs_by
        self._lock = forking.lock()
        self._ready: WeakSet[PreTrainedModel] = WeakSet()
        self._stop_criterion = _stop_criterion(stop_strings, tokenizer)

    def __repr__(self) -> str:
        values = self.config.as_dict()
        shown = f"speculate({', '.join(f'{name}={_short(value)}' for name, value in values.items())})"
        drafting = describe_drafting(self.stats, self.governor) if self.config.is_speculative else []
        return "\n".join([shown, *drafting])

    def __deepcopy__(self, memo: dict[int, Any]) -> Speculation:
        """Return the object itself, so that a copy of the arguments of ``generate`` copies no model or counter."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            "the result of speculate(...) contains locks and prepared models and cannot be pickled: call "
            "speculate(...) with the same arguments in each process"
        )

    @makes_on_cpu
    def prepare(self, model: PreTrainedModel) -> Speculation:
        """Check, probe and pack a model and load its drafter now, instead of in the first call.

        The preparation takes seconds and happens once per model and ``execution``. Later calls only check for changes.

        Args:
          model: model whose ``generate`` will be called later.

        Returns: this object, so that ``custom_generate=speculate("ngram").prepare(model)`` works.
        Raises: the errors of a call, for a model or a drafter that cannot be used.
        Randomness: draws nothing from torch's global generator.
        """
        model = check_unwrapped(model)
        refusals.check_model(model)
        with torch.random.fork_rng(devices=()), self._preparing(model):
            adapter, drafting = self._prepared(model)
            with adapter.lock:
                config = self._engine_config(1)
                Engine(adapter.target, drafting.new_drafter(), config)
                for lm in (adapter.target, drafting.model):
                    if lm is not None:
                        _decode_a_little(lm, config)
        return self

    def _engine_config(self, num_rows: int, **options: Any) -> EngineConfig:
        acceptance, limits = self.config.rejection_sample_method, self.config.typical_limits
        return EngineConfig(max_num_seqs=num_rows, acceptance=acceptance, typical=limits, **options)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode. ``generate`` calls this after all its own preparations.

        Args:
          model: the model whose ``generate`` was called.
          input_ids: (B, T), padded at the beginning, expanded by ``num_return_sequences``.
          logits_processor, stopping_criteria, generation_config, model_kwargs: values that ``generate`` prepared.
          synced_gpus: value of that argument of ``generate``.
          streamer: streamer of ``generate``.

        Returns: the result of plain ``generate``: int64 (B, T + new), or a `GenerateDecoderOnlyOutput` without a cache.
        Raises: UnsupportedModelError, ProbeError, ConfigError, PromptError before anything runs; NumericsError.
        """
        caller = GenerateArguments.find()
        synced = synced_gpus if synced_gpus is not None else caller.synced_gpus
        theirs = streamer if streamer is not None else caller.streamer  # ``generate`` has already put the prompt
        with _ended(self._streamer), _ended(theirs):
            _check(model, input_ids, logits_processor, generation_config, model_kwargs, caller, synced)
            if theirs is not None and self._streamer is not None:
                raise ConfigError("both speculate(...) and generate(...) got a streamer; give it to only one of them")
            if self._streamer is not None:
                self._streamer.put(input_ids.cpu())
                theirs = self._streamer
            return self._generate(
                model, input_ids, logits_processor, stopping_criteria, generation_config, theirs, model_kwargs
            )

    @makes_on_cpu
    def _generate(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        mask = model_kwargs.get("attention_mask")
        rows = read_rows(input_ids, mask)
        with self._preparing(model, ends_line=streamer is not None):  # the prompt is already on the screen
            with torch.random.fork_rng(devices=()):  # set-up must not draw from the user's generator
                adapter, drafting = self._prepared(model)
            with adapter.lock:
                drafter = drafting.new_drafter()
                governor = drafting.governor(adapter.target, drafter)
        check_positions(rows, mask, model_kwargs.get("position_ids"), adapter.target)
        endings = Endings(self._with_stop_strings(criteria))
        keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        pad = config._pad_token_tensor  # value chosen by ``generate``
        pad_id = None if pad is None else int(pad)
        columns = Columns(input_ids, endings, pad_id, streamer, keeps_scores=keeps_scores, keeps_logits=keeps_logits)
        engine_config = self._engine_config(
            len(rows),
            prefill_chunk_size=config.prefill_chunk_size or EngineConfig.prefill_chunk_size,
            output_scores=keeps_scores,
            output_logits=keeps_logits,
        )
        eos = sorted(endings.eos_token_ids)
        with adapter.lock:
            engine = Engine(adapter.target, drafter, engine_config, eos_token_ids=eos, governor=governor)
        seed = int(torch.randint(0, 2**63 - 1, ())) if config.do_sample else None
        call = Call(engine, adapter.lock, columns, rows, processors=processors, seed=seed)
        governed = None if governor is None else (governor, replace(governor.totals))
        call.run()
        call.fill_tails()
        with self._lock:
            self.stats.add(call.stats)
            self.governor = None if governed is None else governed[0].report(governed[1])
        if not config.return_dict_in_generate:
            return columns.sequences
        return GenerateDecoderOnlyOutput(
            sequences=columns.sequences,
            scores=tuple(columns.scores) if keeps_scores else None,
            logits=tuple(columns.logits) if keeps_logits else None,
        )

    def _with_stop_strings(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        if self._stop_criterion is None:
            return criteria
        return StoppingCriteriaList([*criteria, self._stop_criterion])

    @contextmanager
    def _preparing(self, model: PreTrainedModel, *, ends_line: bool = False) -> Iterator[None]:
        """Context of preparations. If the preparations take long, a line reports them in the first call for a model."""
        if model in self._ready:
            yield
            return
        with stage_if_slow(partial(_work_on, model), ends_line=ends_line):
            yield
        self._ready.add(model)

    def _prepared(self, model: PreTrainedModel) -> tuple[Adapter, Drafting]:
        adapter = shared_adapter(model, *self._runs_by)
        with adapter.lock:
            return adapter, adapter.drafting(model, self.config, self._tokenizer)


def _check(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    caller: GenerateArguments,
    synced_gpus: bool | None,
) -> None:
    """Refuse, before anything runs, a call that cannot be decoded exactly."""
    refusals.check_model(model)
    refusals.check_config(config, caller)
    is_multimodal = model.config.get_text_config(decoder=True) is not model.config
    refusals.check_inputs(model_kwargs, caller, is_multimodal=is_multimodal)
    refusals.check_processors(processors)
    refusals.check_processes(model, synced_gpus)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise PromptError(
            f"input_ids have the shape {tuple(input_ids.shape)}; give (rows, tokens), at least one of each"
        )


def _decode_a_little(lm: CausalLM, config: EngineConfig) -> None:
    """Decode one token, so that measurements, allocations and compilation of the first steps happen now."""
    engine = Engine(lm, EmptyDrafter(), config)
    engine.add_request([0, 0], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
    for _ in engine.run():
        pass


def _work_on(model: PreTrainedModel) -> str:
    """Return the name of the preparations for a model."""
    path = str(model.name_or_path or "")
    return f"preparing and testing {zoo.name_of(path) or path or 'the model'}"


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, PreTrainedModel) else repr(value)


@contextmanager
def _ended(streamer: Any) -> Iterator[None]:
    """End a streamer, even if the call fails. If the streamer were not ended, its reader in another thread would wait
    forever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _stop_criterion(
    stop_strings: str | Iterable[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria | None:
    """Return transformers' own criterion for these strings, or None."""
    if stop_strings is None:
        return None
    if tokenizer is None:
        raise ConfigError(f"stop_strings={stop_strings!r} need the tokenizer of the model; give tokenizer as well")
    found = strings("speculate", "stop_strings", stop_strings)
    if not found:
        raise ConfigError(f"speculate.stop_strings is {stop_strings!r}; give one string, or several")
    return StopStringCriteria(stop_strings=list(found), tokenizer=tokenizer)
